"""Text from an engine in this process."""

from __future__ import annotations

import pytest

from engine.core import RequestError, load_engine
from engine.generate import generate
from engine.messages import SamplingParams
from engine.models.loader import load_tokenizer
from engine.settings import EngineSettings


def test_generate_ends_at_a_stop_string_and_leaves_nothing(write_folder):
    folder, _ = write_folder()
    engine = load_engine(EngineSettings(model=str(folder), max_context=128, dtype="float32"))
    tokenizer = load_tokenizer(folder)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    messages = [{"role": "user", "content": "hello w"}]
    text = generate(engine, tokenizer, messages, params)
    assert text == generate(engine, tokenizer, tokenizer.chat(messages), params)
    stop = text[3:5]
    assert generate(engine, tokenizer, messages, params, [stop]) == text[: text.find(stop)]
    with pytest.raises(RequestError, match="128"):
        generate(engine, tokenizer, "hell" * 200, params)
    engine.check()
    assert not engine.has_work
