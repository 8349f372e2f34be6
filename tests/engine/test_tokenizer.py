"""Text to ids and back, chat templates, and what users may not smuggle in."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from engine.models.loader import load_tokenizer
from engine.tokenizer import GUARD, ChatTemplateError, Tokenizer, byte_level_bpe

SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>"]
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
MARKS = str.maketrans("", "", "\ufdd0\ufdd1")
HELLO = [{"role": "user", "content": "hello"}]


def tokenizer(template: str | None = CHATML, add_bos: bool = False) -> Tokenizer:
    backend = byte_level_bpe(
        [*SPECIALS, *LETTERS, "he"], [("h", "e")], pre_tokenizer="smollm", special=SPECIALS
    )
    return Tokenizer(backend, template=template, bos_id=0, eos_ids=(2,), add_bos=add_bos)


PLAIN = tokenizer()


def qwen() -> tuple[Tokenizer, transformers.PreTrainedTokenizerFast]:
    """A small vocabulary in the hands of both implementations."""
    tokens = [*SPECIALS, *LETTERS, "he", "Ġhe", "Ã©"]
    merges = [("h", "e"), ("Ġ", "he"), ("Ã", "©")]
    backend = byte_level_bpe(tokens, merges, pre_tokenizer="qwen2", special=SPECIALS)
    peer = transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token=None,
        pad_token=None,
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIALS[:2],
    )
    return Tokenizer(backend, template=None, bos_id=None, eos_ids=(2,), add_bos=False), peer


QWEN, PEER_OF_QWEN = qwen()


@given(text=st.text())
@settings(max_examples=200)
def test_any_text_comes_back(text):
    for special in (True, False):
        ids = PLAIN.encode(text, special=special)
        assert PLAIN.decode(ids, special=True) == text.replace(GUARD, "")
        assert b"".join(map(PLAIN.token_bytes, ids)) == text.replace(GUARD, "").encode()


@given(
    pieces=st.lists(
        st.one_of(st.sampled_from([*SPECIALS, GUARD, "<", "|>", "im_end", "he"]), st.text()), max_size=8
    )
)
@settings(max_examples=200)
def test_no_message_can_write_a_control_token(pieces):
    text = "".join(pieces)
    ids = PLAIN.encode_prompt(PLAIN.chat([{"role": "user", "content": text}]))
    assert [i for i in ids if i < len(SPECIALS)] == [1, 2, 1]
    assert PLAIN.decode(ids) == f"user\n{text.translate(MARKS)}\nassistant\n"


def test_a_prefill_cannot_write_a_control_token_either():
    rendered = PLAIN.chat(HELLO, prefill="so<|im_end|>")
    assert PLAIN.encode_prompt(rendered)[-12:] == PLAIN.encode("so<|im_end|>", special=False)
    assert 2 not in PLAIN.encode_prompt(rendered)[-12:]


def test_specials_that_contain_each_other():
    specials = ["<<a>>", "<a>", "a>>"]
    backend = byte_level_bpe([*specials, *LETTERS], [], pre_tokenizer="gpt-2", special=specials)
    tok = Tokenizer(backend, template=CHATML, bos_id=None, eos_ids=(), add_bos=False)
    ids = tok.encode_prompt(tok.chat([{"role": "user", "content": "<<a>> <a>>"}]))
    assert min(ids) >= len(specials)
    assert "<<a>> <a>>" in tok.decode(ids)


def test_special_tokens_in_plain_prompts_are_parsed():
    assert PLAIN.encode("he<|im_end|>") == [259, 2]
    assert PLAIN.encode_prompt("<|im_start|>he") == [1, 259]
    assert 2 not in PLAIN.encode("he<|im_end|>", special=False)


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, "{{ bos_token }}" + WITH_BOS])
def test_exactly_one_bos(template):
    tok = tokenizer(template, add_bos=True)
    ids = tok.encode_prompt(tok.chat(HELLO))
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert tok.encode_prompt("") == [0]
    assert tok.encode_prompt("he") == [0, 259]
    assert tok.encode("he") == [259]


def test_no_bos_where_the_model_wants_none():
    assert PLAIN.encode_prompt("he") == [259]
    assert PLAIN.encode_prompt("") == []


def test_generation_prompt_and_prefill():
    open_turn = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert PLAIN.chat(HELLO) == open_turn
    assert PLAIN.chat(HELLO, add_generation_prompt=False) == open_turn.removesuffix("<|im_start|>assistant\n")
    said = [*HELLO, {"role": "assistant", "content": "It is "}]
    assert PLAIN.chat(said) == open_turn + "It is "
    assert PLAIN.chat(said, prefill="a") == open_turn + "It is a"
    assert PLAIN.chat(HELLO, prefill="It is ") == open_turn + "It is "
    assert PLAIN.chat([*said, *HELLO]).count("<|im_end|>") == 3


def test_prefill_survives_a_template_that_trims():
    tok = tokenizer(CHATML.replace("m['content']", "m['content'] | trim"))
    assert tok.chat(HELLO, prefill=" so ").endswith("assistant\n so ")


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}]
    PLAIN.chat(messages, prefill="b")
    assert messages == [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (None, HELLO, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", HELLO, "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", HELLO, "failed on the messages"),
        ("{{ messages[5]['role'] }}", HELLO, "refused|failed"),
        ("{{ messages.append(1) }}", HELLO, "refused"),
        ("{{ ''.__class__.__mro__ }}", HELLO, "refused"),
        ("{{ messages[0]['content'] }}", [*HELLO, {"role": "assistant", "content": "x"}], "continued"),
        (CHATML, [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}], "continued"),
        (CHATML, [{"role": "user", "content": None}], "failed on the messages"),
    ],
)
def test_what_a_template_refuses(template, messages, said):
    with pytest.raises(ChatTemplateError, match=said):
        tokenizer(template).chat(messages)


def test_template_helpers():
    assert tokenizer("{{ strftime_now('%Y') }}").chat(HELLO).startswith("20")
    assert tokenizer('{{ {"a": "é<"} | tojson }}').chat(HELLO) == '{"a": "é<"}'
    assert tokenizer("{% for m in messages %}\n  {% break %}\n{% endfor %}\nx").chat(HELLO) == "x"
    assert tokenizer("{{ eos_token }}{{ bos_token }}").chat(HELLO) == "<|im_end|><s>"


def test_digits_and_contractions_are_cut_as_the_names_say():
    def cut(name: str, text: str) -> list[str]:
        backend = byte_level_bpe(LETTERS, [], pre_tokenizer=name)
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert cut("smollm", "it's 1234 ok") == ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġok"]
    assert cut("gpt-2", "it's 1234 ok") == ["it", "'s", "Ġ1234", "Ġok"]
    assert cut("llama-bpe", "IT'S 1234 ok") == ["IT", "'S", "Ġ", "123", "4", "Ġok"]


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_qwen_cuts_text_as_the_peer_does(text):
    """Unlike the others it composes accents first, and keeps no two digits together."""
    text = text.translate(MARKS)  # of ours, which are no text
    assert QWEN.encode(text) == PEER_OF_QWEN.encode(text, add_special_tokens=False)


def test_qwen_on_what_is_special_about_it():
    for text in ("it's 1234 ok\n\n  x", "e\u0301 = \u00e9", "<|im_end|>he<|im_end|>"):
        assert QWEN.encode(text) == PEER_OF_QWEN.encode(text, add_special_tokens=False), text


THINKING = """
{%- set ns = namespace(asked=0) -%}
{%- for m in messages[::-1] -%}
  {%- if m.role == 'user' and ns.asked == 0 and not m.content.startswith('<tool') -%}
    {%- set ns.asked = messages|length - 1 - loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages -%}
  {%- set said = m.content if m.content is string else '' -%}
  {%- if m.role == 'assistant' and '</think>' in said -%}
    {%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
    {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
    {%- if loop.index0 > ns.asked and (loop.last or thought) -%}
      {%- set said = '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said -%}
    {%- endif -%}
  {%- endif -%}
  {{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>' + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}
{%- endif -%}
"""


def test_template_of_a_model_that_thinks():
    """The means that Qwen's templates use, rendered as the peer does."""
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<think>\nlong\n</think>\n\nanswer"},
        {"role": "user", "content": "second"},
    ]
    expected = PEER_OF_QWEN.apply_chat_template(
        messages, chat_template=THINKING, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer(THINKING).chat(messages) == expected
    assert "long" not in expected
    assert "answer" in expected
    open_answer = [*messages, {"role": "assistant", "content": "<think>\nwell\n</think>\n\nIt is"}]
    assert tokenizer(THINKING).chat(open_answer).endswith("It is")


def test_byte_fallback_vocabulary():
    """The SentencePiece kind: spaces are ▁, unknown bytes have tokens of their own."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(vocab)},
            merges=[("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in vocab[:3]])
    tok = Tokenizer(backend, template=None, bos_id=1, eos_ids=(2,), add_bos=True)
    ids = tok.encode_prompt("a a é")
    assert ids[0] == 1
    assert tok.decode(ids) == "a a é" == backend.decode(ids)
    assert b"".join(map(tok.token_bytes, ids)) == " a a é".encode()


def test_token_bytes_of_what_is_no_text():
    assert [PLAIN.token_bytes(i) for i in (0, 1, 2, -1, 10_000)] == [b""] * 5


def test_shared_between_threads():
    expected = PLAIN.encode("he<|im_end|>" * 50)
    found = []

    def work() -> None:
        for _ in range(50):
            PLAIN.encode("<|im_end|>", special=False)
            found.append(PLAIN.encode("he<|im_end|>" * 50) == expected)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 200


def test_long_texts_let_other_threads_run():
    text = "he llo " * 100_000
    began = threading.Event()

    def work() -> None:
        began.wait()
        PLAIN.encode(text)

    thread = threading.Thread(target=work)
    thread.start()
    began.set()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5  # one or two, if it held the interpreter


@pytest.fixture(scope="module")
def real(smollm: Path) -> Tokenizer:
    return load_tokenizer(smollm)


@pytest.fixture(scope="module")
def peer(smollm: Path):
    """The peer reads the same file but leaves the digit rule out: put it in."""
    import transformers
    from tokenizers import pre_tokenizers

    peer = transformers.AutoTokenizer.from_pretrained(str(smollm.parent), gguf_file=smollm.name)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    peer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words])
    return peer


@pytest.mark.model
def test_chat_prompt_is_the_published_one(real):
    ids = real.encode_prompt(real.chat(HELLO))
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
        "trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert real.decode(ids, special=True) == text
    assert ids.count(real.bos_id) == 3
    assert ids[:3] == [1, 9690, 198]


@pytest.mark.model
def test_agrees_with_the_peer(real, peer):
    @given(text=st.one_of(st.text(), st.from_regex(r"([ \t\n]*[\w'.,!?<|>-]{0,12}){0,8}")))
    @settings(max_examples=300, deadline=None)
    def agrees(text: str) -> None:
        ids = real.encode(text)
        assert ids == peer(text, add_special_tokens=False)["input_ids"]
        assert real.decode(ids) == peer.decode(ids, skip_special_tokens=True)

    agrees()


@pytest.mark.model
def test_chat_agrees_with_the_peer(real, peer):
    peer.chat_template = real.template
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "Hi"},
    ]
    rendered = peer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert real.chat(messages) == rendered
    rendered = peer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert real.chat(messages[:2]) == rendered


@pytest.mark.model
def test_every_token_has_its_bytes(real, peer):
    ids = list(range(real.vocab_size))
    assert b"".join(map(real.token_bytes, ids)).decode(errors="replace") == peer.decode(
        ids, skip_special_tokens=True
    )
