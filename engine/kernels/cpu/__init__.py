"""Native CPU kernels: C++ in `src/`, compiled at first use for this machine's instruction set.

`build` finds or compiles the shared object, `library` opens it. `engine.models.native` runs whole
steps on it.
"""
