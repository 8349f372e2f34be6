"""`python -m engine.process`: the worker, imported without the garbage collector.

Imports make objects that stay. Looking through them again and again takes a tenth of the start; the worker
freezes them and switches the collector on once the model is loaded.
"""

import gc

gc.disable()

from engine.process.worker import main  # noqa: E402  the collector is off before the first import

main()
