"""Pairs: every form that TRL takes, what is refused with file and line, what is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_sft

from lightrl.config.schema import DataConfig, DPOConfig, RMConfig
from lightrl.data import DataError
from lightrl.data.pairs import PairSet, load_pairs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_sft.make_model(tmp_path_factory.mktemp("pairs")))


@pytest.fixture
def load(tmp_path, tokenizer):
    """`load([row, …], chat=True, rm=False, data={}, **keys)`: the pairs of a file with these rows."""

    def read(
        rows: list[Any], *, chat: bool = True, rm: bool = False, data: dict[str, Any] | None = None, **keys: Any
    ) -> PairSet:
        file: Path = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_pairs(
            DataConfig(path=str(file), apply_chat_template=chat, **(data or {})),
            RMConfig(**keys) if rm else DPOConfig(**keys),
            tokenizer,
            context_length=128,
            end_ids=[2],
            pad_token_id=tokenizer.pad_token_id if rm else None,
        )

    return read


def said(tokenizer: Any, tokens: list[int], mask: list[int]) -> str:
    """The text, with what counts in capitals, or brackets. There are no letters behind p: names of roles have holes."""
    text = "".join(
        t.upper() if m and len(t) == 1 else f"[{t}]" if m else t
        for t, m in zip(tokenizer.convert_ids_to_tokens(tokens), mask, strict=True)
    )
    for role in ("assistant", "system", "user"):
        text = text.replace(re.sub("[q-z]", "<pad>", role), role)
    return text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


WHOLE = [user("a"), bot("b"), user("c")]
FORMS: dict[str, dict[str, Any]] = {
    "prompt and messages": {"prompt": [user("a")], "chosen": [bot("bad")], "rejected": [bot("be")]},
    "prompt and texts": {"prompt": "a", "chosen": "bad", "rejected": "be"},
    "prompt of messages, answers of text": {"prompt": [user("a")], "chosen": "bad", "rejected": "be"},
    "text and messages": {"prompt": "a", "chosen": [bot("bad")], "rejected": [bot("be")]},
    "implicit prompt": {"chosen": [user("a"), bot("bad")], "rejected": [user("a"), bot("be")]},
    "UltraFeedback": {"prompt": "a", "chosen": [user("a"), bot("bad")], "rejected": [user("a"), bot("be")]},
    "prompt twice": {"prompt": [user("a")], "chosen": [user("a"), bot("bad")], "rejected": [user("a"), bot("be")]},
    "from and value": {
        "chosen": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bad"}],
        "rejected": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "be"}],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_trl(load, tokenizer, form: str) -> None:
    (pair,) = load([FORMS[form]])
    begin = "<|im_start|>user a<|im_end|><|im_start|>assistant "
    assert said(tokenizer, pair.chosen.tokens, pair.chosen.loss_mask) == begin + "BAD[<|im_end|>]"
    assert said(tokenizer, pair.rejected.tokens, pair.rejected.loss_mask) == begin + "BE[<|im_end|>]"
    assert pair.prompt_length == pair.chosen.loss_mask.index(1)  # though both answers begin with b


def test_turns_in_common_are_the_prompt(load, tokenizer) -> None:
    (pair,) = load(
        [{"chosen": [*WHOLE, bot("d"), user("e"), bot("f")], "rejected": [*WHOLE, bot("g")]}],
        data={"system_prompt": "h"},
    )
    begin = (
        "<|im_start|>system h<|im_end|><|im_start|>user a<|im_end|><|im_start|>assistant b<|im_end|>"
        "<|im_start|>user c<|im_end|><|im_start|>assistant "
    )
    rest = "D[<|im_end|>]<|im_start|>user e<|im_end|><|im_start|>assistant F[<|im_end|>]"
    assert said(tokenizer, pair.chosen.tokens, pair.chosen.loss_mask) == begin + rest
    assert said(tokenizer, pair.rejected.tokens, pair.rejected.loss_mask) == begin + "G[<|im_end|>]"


def test_texts_without_roles(load, tokenizer) -> None:
    for row in ({"prompt": "abc", "chosen": "bad", "rejected": "me"}, {"chosen": "abcbad", "rejected": "abcme"}):
        (pair,) = load([row], chat=False)
        assert said(tokenizer, pair.chosen.tokens, pair.chosen.loss_mask) == "abcBAD[<eos>]"
        assert said(tokenizer, pair.rejected.tokens, pair.rejected.loss_mask) == "abcME[<eos>]"
        assert pair.prompt_length == 3
    (pair,) = load([{"prompt": "abc", "chosen": "bad", "rejected": "be"}], chat=False, rm=True)
    assert said(tokenizer, pair.chosen.tokens, pair.chosen.loss_mask) == "abcbad[<eos>]"
    assert pair.prompt_length == 4  # nothing but the last token counts: b is shared too


def test_a_reward_model_looks_at_the_last_token_that_is_not_padding(load, tokenizer) -> None:
    rows = [{"prompt": "abc", "chosen": "bad<pad><pad>", "rejected": "me", "margin": 2}]
    eos, tokenizer.eos_token = tokenizer.eos_token, "<pad>"
    try:
        (pair,) = load(rows, chat=False, rm=True, margin_key="margin")
    finally:
        tokenizer.eos_token = eos
    assert said(tokenizer, pair.chosen.tokens, pair.chosen.loss_mask) == "abcbaD"
    assert said(tokenizer, pair.rejected.tokens, pair.rejected.loss_mask) == "abcmE"
    assert pair.margin == 2.0


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b"}, {}, r"no field 'rejected': set dpo\.rejected_key to the right one; the row has"),
    ({"prompt": "a", "chosen": "b", "rejected": 3}, {}, r"field .rejected. \(dpo\.rejected_key\) must be text"),
    ({"prompt": "a", "chosen": "b", "rejected": [bot("c")]}, {}, r"are a string and a list: make them alike"),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, {}, r"field 'prompt' \(dpo\.prompt_key\) must be text .* a number"),
    ({"question": "a", "chosen": "b", "rejected": "c"}, {}, r"no field 'prompt', whose answers are text: set"),
    ({"chosen": [user("a"), bot("b")], "rejected": [user("c"), bot("b")]}, {}, r"do not begin alike"),
    ({"prompt": [user("a")], "chosen": [user("b")], "rejected": [bot("c")]}, {}, r"'chosen' .* no message of the ass"),
    ({"chosen": [user("a"), bot("b")], "rejected": [user("a")]}, {}, r"'rejected' .* no message of the assistant"),
    ({"prompt": "a", "chosen": [{"content": "b"}], "rejected": [bot("c")]}, {}, r"'chosen' .*message 1 must be an"),
    ({"prompt": [user("a")], "chosen": [bot("b")], "rejected": [bot("c")]}, {"chat": False}, r"need the chat template"),
    ({"chosen": "ab", "rejected": "cd"}, {"chat": False}, r"do not begin alike"),
    ({"prompt": "a", "chosen": "\ud800", "rejected": "c"}, {}, r"half a character"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"rm": True, "margin_key": "m"}, r"no field 'm': set rm"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "m": "x"}, {"rm": True, "margin_key": "m"}, r"must be a finite"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "message"), BAD, ids=range(len(BAD)))
def test_bad_rows_are_told_with_their_line(load, row, settings, message: str) -> None:
    good: dict[str, Any] = {"prompt": "a", "chosen": "b", "rejected": "c", "m": 1}
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: .*" + message + r".*\(and 1 more bad row\)"):
        load([good, row, row], **settings)


def nothing(row: dict[str, Any]) -> None:
    """A `data.map`."""


def test_what_is_left_out_is_said(load) -> None:
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b" * 60, "rejected": "c"},
    ]
    found = load(rows, max_tokens=50)
    assert [p.index for p in found] == [0]
    assert found.notices == (
        "data: left out 1 of 3 pairs whose answers are the same",
        "data: dropped 1 of 2 pairs longer than 50 tokens",
    )
    with pytest.raises(DataError, match=r"pairs\.jsonl:3: a conversation has \d+ tokens, the limit is 50 \(dpo\.max"):
        load(rows, max_tokens=50, data={"overlong": "error"})
    with pytest.raises(DataError, match=r"none of the 2 pairs is within 20 tokens"):
        load(rows, max_tokens=20)
    with pytest.raises(DataError, match=r"in all 1 pairs both answers are the same"):
        load(rows[:1])
    with pytest.raises(DataError, match=r"pairs\.jsonl: data\.map left out all 3 rows"):
        load(rows, data={"map": "test_data_pairs:nothing"})
    with pytest.raises(DataError, match=r"none of the 1 pairs is within 128 tokens \(the model's context\)"):
        load([{"prompt": "a", "chosen": "b" * 120, "rejected": "c"}])


def test_a_fingerprint_is_of_tokens_masks_and_margins(load) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "m": 1}
    first = load([row], rm=True, margin_key="m").fingerprint
    assert load([row], rm=True, margin_key="m").fingerprint == first
    assert load([row | {"m": 2}], rm=True, margin_key="m").fingerprint != first
    assert load([row | {"chosen": "d"}], rm=True, margin_key="m").fingerprint != first
