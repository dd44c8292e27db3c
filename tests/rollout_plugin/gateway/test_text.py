"""Text out of tokens, as it comes, with real tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.errors import UsageError
from rollout_plugin.gateway.text import Words, load_words

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def words(tiny: Path) -> Words:
    return load_words(dict, tiny)


@given(text=st.text(max_size=40), data=st.data())
def test_an_answer_in_any_pieces_is_spelled_as_the_whole_without_half_a_character(
    words: Words, text: str, data: st.DataObject
) -> None:
    tokens = words.encode(text)
    spelling, said = words.spelling([]), []
    while tokens:
        size = data.draw(st.integers(1, len(tokens)))
        said.append(spelling.push(tokens[:size]))
        tokens = tokens[size:]
    said.append(spelling.end())
    assert "".join(said) == text
    assert all("\ufffd" not in part or "\ufffd" in text for part in said)


@given(
    text=st.text(alphabet="ab", max_size=30), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3)
)
def test_nothing_of_a_stop_text_is_ever_said(words: Words, text: str, stops: list[str]) -> None:
    spelling, said = words.spelling(stops), ""
    for token in words.encode(text):
        said += spelling.push([token])
    said += spelling.end()
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    first = min((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text) if ends else None
    if first is None:
        assert (said, spelling.stopped) == (text, False)
    else:
        # The stop text that is whole first ends the answer; one that begins before it and is whole too goes first.
        whole = [at for stop in stops if (at := text[: first[0]].find(stop)) >= 0]
        assert (said, spelling.stopped) == (text[: min(whole)], True)


def test_a_chat_is_rendered_by_the_template_that_came_with_the_weights(tiny: Path) -> None:
    files = {
        "tokenizer.json": (tiny / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": (tiny / "tokenizer_config.json").read_bytes(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    words = load_words(lambda: files)
    messages = [{"role": "user", "content": "hi"}]
    assert words.chat(messages) == words.encode("<user>hi<assistant>")


def test_a_run_without_a_tokenizer_or_a_template_is_told_what_to_send_instead(words: Words) -> None:
    with pytest.raises(UsageError, match="send token ids"):
        load_words(dict)
    with pytest.raises(UsageError, match="messages: expected what the chat template takes"):
        words.chat([{"role": "user", "content": "hi"}])
