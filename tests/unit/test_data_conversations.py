"""Sets of conversations: shapes of rows, messages that are trained or not, lengths, errors with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest

from lightrl.config.schema import DataConfig, SFTConfig
from lightrl.data import DataError, PromptSource
from lightrl.data.conversations import Conversation, ConversationSet, load_conversations

TOKENIZER = templates.tokenizer(templates.CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


Q, A, B = message("user", "q"), message("assistant", "a"), message("assistant", "b")


def load(
    folder: Path,
    rows: list[Any],
    *,
    tokenizer: Any = TOKENIZER,
    sft: dict[str, Any] | None = None,
    context: int = 1000,
    **data: Any,
) -> ConversationSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(**{"path": str(path), "input_key": "messages", "apply_chat_template": True, **data})
    return load_conversations(config, SFTConfig(**(sft or {})), tokenizer, context_length=context, end_ids=[END])


def trained(conversation: Conversation, tokenizer: Any = TOKENIZER) -> str:
    """The trained tokens as text."""
    pairs = zip(conversation.tokens, conversation.loss_mask, strict=True)
    return str(tokenizer.decode([token for token, mask in pairs if mask], skip_special_tokens=False))


def text(conversation: Conversation, tokenizer: Any = TOKENIZER) -> str:
    return str(tokenizer.decode(conversation.tokens, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("messages", "train_on", "expected"),
    [
        ([Q, A, Q, B], "assistant", "a<|im_end|>b<|im_end|>"),
        ([Q, A, Q, B], "last", "b<|im_end|>"),
        ([Q, {**A, "train": False}, Q, B], "assistant", "b<|im_end|>"),
        ([Q, {**A, "train": None}, {**Q, "train": False}, B], "assistant", "a<|im_end|>b<|im_end|>"),
        ([Q, {**A, "train": True}, Q, B], "last", "a<|im_end|>b<|im_end|>"),
        ([Q, {**A, "train": True}, Q, {**B, "train": False}], "last", "a<|im_end|>"),
        ([Q, {**A, "weight": 0}, Q, {**B, "weight": 1}], "assistant", "b<|im_end|>"),
        ([Q, A, Q], "last", "a<|im_end|>"),
    ],
)
def test_which_messages_are_trained(tmp_path: Path, messages: Any, train_on: Any, expected: str) -> None:
    (found,) = load(tmp_path, [{"messages": messages}], sft={"train_on": train_on})
    assert trained(found) == expected
    bare = [{k: v for k, v in m.items() if k in ("role", "content")} for m in messages]
    assert found.tokens == TOKENIZER.apply_chat_template(bare, return_dict=False)


def test_flags_do_not_reach_the_template(tmp_path: Path) -> None:
    seen = templates.tokenizer(templates.CHATML.replace("+ m['content']", "+ m['content'] + m.keys() | join"))
    (found,) = load(tmp_path, [{"messages": [Q, {**A, "train": True, "weight": 1, "name": "x"}]}], tokenizer=seen)
    assert "train" not in text(found, seen)
    assert "weight" not in text(found, seen)
    assert "rolecontentname" in text(found, seen)


def test_openhermes_rows_are_read_as_they_are(tmp_path: Path) -> None:
    """`conversations` of from and value, with one line of config: data.input_key = "conversations"."""
    theirs = [("system", "be kind"), ("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")]
    ours = [("system", "be kind"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    row = {"conversations": [{"from": who, "value": what, "weight": None} for who, what in theirs], "source": "x"}
    (found,) = load(tmp_path, [row], input_key="conversations")
    (same,) = load(tmp_path, [{"messages": [message(*pair) for pair in ours]}])
    assert (found.tokens, found.loss_mask) == (same.tokens, same.loss_mask)
    assert trained(found) == "a<|im_end|>b<|im_end|>"


def test_questions_with_an_answer_of_their_own_field(tmp_path: Path) -> None:
    """Rows of prompts, as RL has them: the label is the answer."""
    rows = [{"messages": "q", "label": "a"}, {"messages": [message("system", "s"), Q], "label": "b"}]
    first, second = load(tmp_path, rows, label_key="label", system_prompt="be kind")
    assert text(first).startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nq")
    assert text(second).startswith("<|im_start|>system\ns<|im_end|>")
    assert (trained(first), trained(second)) == ("a<|im_end|>", "b<|im_end|>")


def test_an_answer_of_messages(tmp_path: Path) -> None:
    """TRL's prompt and completion. What the prompt's own messages answer is not trained, unless they say so."""
    rows = [
        {"messages": [Q, A, Q], "label": [B]},
        {"messages": [Q, {**A, "train": True}, Q], "label": [B, Q, A]},
        {"messages": [{"from": "human", "value": "q"}], "label": [{"from": "gpt", "value": "b"}]},
        {"messages": [Q, A, Q], "label": "b"},
    ]
    found = load(tmp_path, rows, label_key="label", system_prompt="be kind")
    assert [trained(c) for c in found] == [
        "b<|im_end|>", "a<|im_end|>b<|im_end|>a<|im_end|>", "b<|im_end|>", "b<|im_end|>"
    ]  # fmt: skip
    last = load(tmp_path, rows[1:2], label_key="label", sft={"train_on": "last"})
    assert trained(last[0]) == "a<|im_end|>a<|im_end|>"
    assert text(found[0]) == text(load(tmp_path, [{"messages": [Q, A, Q, B]}], system_prompt="be kind")[0])


def test_empty_answers_are_told(tmp_path: Path) -> None:
    call = message("assistant", "", tool_calls=[{"name": "search"}])
    rows = [
        [Q, A],
        [Q, message("assistant", " ")],
        [Q, call, message("tool", "t"), A],
        [Q, A, Q, message("assistant", "")],
    ]
    found = load(tmp_path, [{"messages": messages} for messages in rows])
    assert found.notices == (
        "data: in 2 conversations an answer to train on is empty, so that the model learns to say nothing: remove the "
        "rows, or set train = false in the message",
    )
    assert load(tmp_path, [{"messages": [Q, {**message("assistant", ""), "train": False}, Q, A]}]).notices == ()


def test_text_without_a_template(tmp_path: Path) -> None:
    """Prompt, answer and the end-of-sequence token: each part tokenized alone, as it will be when it is sampled."""
    (found,) = load(tmp_path, [{"messages": "q:\n", "label": "\nyes"}], label_key="label", apply_chat_template=False)
    assert text(found) == "q:\n\nyes</s>"
    assert trained(found) == "\nyes</s>"


def test_tools_are_given_to_the_template(tmp_path: Path) -> None:
    listed = templates.tokenizer("{% for t in tools or [] %}{{ t['name'] }}{% endfor %}" + templates.CHATML)
    rows = [{"messages": [Q, A], "tools": [{"name": "search"}]}, {"messages": [Q, A], "tools": '[{"name": "look"}]'}]
    first, second = load(tmp_path, rows, tokenizer=listed)
    assert text(first, listed).startswith("search<|im_start|>")
    assert text(second, listed).startswith("look<|im_start|>")
    assert trained(first, listed) == "a<|im_end|>"


ROWS = [
    {"messages": [Q, A]},
    {"messages": [Q, message("assistant", "x" * 30)]},
    {"messages": [message("user", "y" * 40), A]},
]


def test_long_conversations(tmp_path: Path) -> None:
    """The first has 21 tokens, the second 50 and the third 60, whose answer is behind the 40th."""
    lengths = [len(c.tokens) for c in load(tmp_path, ROWS)]
    assert lengths == [21, 50, 60]
    dropped = load(tmp_path, ROWS, sft={"max_tokens": 40})
    assert [c.source.rpartition(":")[2] for c in dropped] == ["1"]
    assert dropped.notices == ("data: dropped 2 of 3 conversations longer than 40 tokens",)
    cut = load(tmp_path, ROWS, overlong="truncate", context=40)
    assert [(c.index, len(c.tokens), len(c.loss_mask)) for c in cut] == [(0, 21, 21), (1, 40, 40)]
    whole = load(tmp_path, ROWS)
    assert (cut[1].tokens, cut[1].loss_mask) == (whole[1].tokens[:40], whole[1].loss_mask[:40])
    assert cut.notices == ("data: dropped 1 and truncated 1 of 3 conversations longer than 40 tokens",)
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: .* has 50 tokens, the limit is 40 \(sft\.max_tokens\).* 1 more"
    ):
        load(tmp_path, ROWS, overlong="error", sft={"max_tokens": 40})
    with pytest.raises(DataError, match=r"none of the 3 conversations .* within 10 tokens \(the model's context\)"):
        load(tmp_path, ROWS, overlong="truncate", context=10)


@pytest.mark.parametrize(
    ("row", "more", "said"),
    [
        ({"messges": []}, {}, r"no field 'messages' \(did you mean 'messges'\?\): set data\.input_key"),
        ({"messages": 3}, {}, r"must be a list of chat messages, or a string .* found a number"),
        ({"messages": "q"}, {}, r"is a string: name its answer by data\.label_key"),
        ({"messages": []}, {}, "empty list of messages"),
        ({"messages": [Q]}, {}, "no message to train on: remove the row"),
        ({"messages": [Q, {**A, "train": False}]}, {}, "no message to train on"),
        ({"messages": [Q, {**A, "train": 1}]}, {}, r"message 2: 'train' must be true or false, found 1"),
        ({"messages": [Q, {**A, "weight": 0.5}]}, {}, r"message 2: 'weight' must be 0 or 1, found 0\.5"),
        ({"messages": [{**Q, "train": True}, A]}, {}, r"message 1: 'train': only messages of the assistant"),
        ({"messages": [{"from": "alien", "value": "x"}]}, {}, r"a message is from 'alien': known are system, human"),
        ({"messages": [{"role": "user"}]}, {}, "message 1 has no text in 'content'"),
        ({"messages": [Q, A], "label": "x"}, {"label_key": "label"}, "ends with an assistant message"),
        (
            {"messages": "q", "label": 3},
            {"label_key": "label"},
            r"must be the answer, as text or as messages, found a number",
        ),
        ({"messages": "q", "label": []}, {"label_key": "label"}, r"must be the answer, .* found an empty list"),
        ({"messages": "q", "label": ["a"]}, {"label_key": "label"}, r"'label' \(data\.label_key\): message 1 must be"),
        ({"messages": "q", "label": [Q]}, {"label_key": "label"}, "no message to train on"),
        ({"messages": "q", "label": [A]}, {"label_key": "label", "apply_chat_template": False}, "need the chat templ"),
        ({"messages": [{"from": "human", "value": None}, A]}, {}, "a message's 'value' must be text, found null"),
        (
            {"messages": "q", "label": ""},
            {"label_key": "label"},
            r"must be the answer, as text or as messages, found an empty string",
        ),
        ({"messages": [Q, message("assistant", "\ud800")]}, {}, "half a character"),
        ({"messages": [Q, A]}, {"apply_chat_template": False}, r"set data\.apply_chat_template = true"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: Any, more: Any, said: str) -> None:
    data = {"label_key": None, **more}
    good = {"messages": "q", "label": "a"} if data["label_key"] else {"messages": [Q, A]}
    rows = [good, row] if data.get("apply_chat_template", True) else [row, row]
    with pytest.raises(DataError, match=rf"rows\.jsonl:{2 if rows[0] is good else 1}: .*{said}"):
        load(tmp_path, rows, **data)


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: message 2: .*\{% generation %\}.*\(and 1 more bad row\)"):
        load(tmp_path, [{"messages": [Q, A]}] * 2, tokenizer=templates.tokenizer(templates.TWICE))
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        load(tmp_path, [{"messages": [Q, A]}], tokenizer=templates.tokenizer(""))
    with pytest.raises(DataError, match=r"sft\.end_of_turn: 'xy' is 2 tokens"):
        load(tmp_path, [{"messages": [Q, A]}], sft={"end_of_turn": "xy"})
    with pytest.raises(DataError, match=r"sft\.end_of_turn: only used with data\.apply_chat_template"):
        load(tmp_path, ROWS, apply_chat_template=False, sft={"end_of_turn": "</s>"})


def test_what_the_template_does_is_told(tmp_path: Path) -> None:
    open_ended = load(tmp_path, ROWS, tokenizer=templates.tokenizer(templates.GLM))
    assert open_ended.notices[0].startswith("data: in 3 conversations the chat template writes no token that ends")
    ended = load(tmp_path, ROWS, tokenizer=templates.tokenizer(templates.GLM), sft={"end_of_turn": "<|user|>"})
    assert ended.notices == ()
    thinking = load(tmp_path, ROWS, tokenizer=templates.tokenizer(templates.DEEPSEEK))
    assert thinking.notices[0].startswith("data: before 3 turns the chat template writes something else")


def test_order_and_fingerprint(tmp_path: Path) -> None:
    rows = [{"messages": [Q, message("assistant", str(i))]} for i in range(7)]
    found = load(tmp_path, rows)
    source = PromptSource(found, seed=3, shuffle=True)
    dealt = source.next(5)
    assert source.num_dealt == 5
    again = PromptSource(load(tmp_path, rows), seed=3, shuffle=True)
    again.restore(source.state())
    assert [c.index for c in source.next(9)] == [c.index for c in again.next(9)]
    assert {c.index for c in dealt} <= set(range(7))
    rows[6]["messages"][1]["train"] = True
    assert load(tmp_path, rows).fingerprint == found.fingerprint
    masked = load(tmp_path, [*rows[:6], {"messages": [Q, A, Q, {**B, "train": False}]}])
    unmasked = load(tmp_path, [*rows[:6], {"messages": [Q, A, Q, B]}])
    assert masked.fingerprint != unmasked.fingerprint
    assert [c.tokens for c in masked] == [c.tokens for c in unmasked]
