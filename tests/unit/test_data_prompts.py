"""Prompt sets: files, slices, templates, lengths, and every way a row can be wrong (case D3)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightrl.config.schema import DataConfig
from lightrl.data import DataError, PromptSet, load_prompts
from lightrl.data.rows import split_slice

# As SmolLM2's: a default system message unless the conversation brings one.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system be helpful<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if tools %}<|im_start|>tools {{ tools | length }}<|im_end|>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}{% if think %} think{% endif %}"
)
WORDS = ["<unk>", "<s>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tools", "think"]
WORDS += ["be", "helpful", "brief", "what", "is", *"123456789"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; `<s>` is put before plain text."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(row, row, …)`: a jsonl file; rows that are bytes are written as they are."""

    def write(*rows: Any, name: str = "train.jsonl") -> str:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"\n".join(lines) + (b"\n" if lines else b""))
        return str(tmp_path / name)

    return write


def load(tokenizer: Any, path: str | list[str], *, context: int = 100, response: int = 10, **data: Any) -> PromptSet:
    config = DataConfig(path=path, **data)
    return load_prompts(config, tokenizer, context_length=context, max_response_tokens=response)


def words(tokens: list[int]) -> str:
    return " ".join(WORDS[t] for t in tokens)


def test_plain_text_is_tokenized_as_the_tokenizer_does(tokenizer: Any, write: Write) -> None:
    path = write({"q": "what is 2", "a": 4, "metadata": {"rm_type": "math"}}, b"  ", {"q": "3", "a": "4"})
    prompts = load(tokenizer, path, input_key="q", label_key="a")
    assert [words(p.tokens) for p in prompts] == ["<s> what is 2", "<s> 3"]
    first, second = prompts
    assert (first.text, first.label, first.metadata, first.messages) == ("what is 2", 4, {"rm_type": "math"}, None)
    assert (first.index, second.index) == (0, 1)
    assert (first.source, second.source) == (f"{path}:1", f"{path}:3")  # the empty line counts as a line, not as a row


def test_a_string_becomes_a_user_message_and_special_tokens_are_not_doubled(tokenizer: Any, write: Write) -> None:
    (prompt,) = load(tokenizer, write({"input": "what is 2"}), apply_chat_template=True)
    rendered = "<|im_start|> system be helpful <|im_end|> <|im_start|> user what is 2 <|im_end|> <|im_start|> assistant"
    assert words(prompt.tokens) == rendered  # no <s>: the template did not write one
    assert prompt.messages == [{"role": "user", "content": "what is 2"}]


def test_the_system_prompt_goes_before_conversations_without_one(tokenizer: Any, write: Write) -> None:
    user = {"role": "user", "content": "1"}
    path = write({"input": [user]}, {"input": [{"role": "system", "content": "be helpful"}, user]}, {"input": "1"})
    prompts = load(tokenizer, path, apply_chat_template=True, system_prompt="be brief")
    systems = [words(p.tokens).split(" <|im_end|>")[0] for p in prompts]
    assert systems == [f"<|im_start|> system be {w}" for w in ("brief", "helpful", "brief")]
    assert words(prompts[0].tokens).count("system") == 1


def test_tools_and_template_arguments_reach_the_template(tokenizer: Any, write: Write) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    path = write({"input": "1", "tools": [tool, tool]}, {"input": "1", "tools": json.dumps([tool])}, {"input": "1"})
    prompts = load(tokenizer, path, apply_chat_template=True, chat_template_kwargs={"think": True})
    assert ["tools 2" in p.text for p in prompts] == [True, False, False]
    assert "tools 1" in prompts[1].text
    assert prompts[0].tools == [tool, tool]
    assert prompts[2].tools is None
    assert all(p.text.endswith("<|im_start|>assistant think") for p in prompts)


def test_nulls_of_a_table_are_not_shown_to_the_template(tokenizer: Any, write: Write) -> None:
    path = write({"input": [{"role": "user", "content": "1", "name": None}], "metadata": None, "tools": None})
    (prompt,) = load(tokenizer, path, apply_chat_template=True)
    assert prompt.messages == [{"role": "user", "content": "1"}]
    assert prompt.metadata == {}


@pytest.mark.parametrize(
    ("slice_", "expected"),
    [("[:2]", "12"), ("[1:]", "23456"), ("[-2:]", "56"), ("[1:-3]", "23"), ("[:]", "123456"), ("[4:99]", "56")],
)
def test_slices(tokenizer: Any, write: Write, slice_: str, expected: str) -> None:
    path = write(*({"input": str(i)} for i in range(1, 7)))
    assert "".join(p.text for p in load(tokenizer, f"{path}@{slice_}")) == expected


def test_a_bad_line_outside_the_slice_is_not_read(tokenizer: Any, write: Write) -> None:
    path = write({"input": "1"}, b"{broken")
    assert len(load(tokenizer, f"{path}@[:1]")) == 1


def test_a_file_of_that_very_name_wins_over_a_slice(tokenizer: Any, write: Write) -> None:
    path = write({"input": "1"}, {"input": "2"}, name="odd@[0:1].jsonl")
    assert len(load(tokenizer, path)) == 2
    assert split_slice(f"{path}@[1:]") == (path, slice(1, None))


def test_paths_are_concatenated_and_indexed_through(tokenizer: Any, write: Write) -> None:
    a, b = write({"input": "1"}, {"input": "2"}, name="a.jsonl"), write({"input": "3"}, name="b.jsonl")
    prompts = load(tokenizer, [b, f"{a}@[1:]"])
    assert [(p.index, p.text) for p in prompts] == [(0, "3"), (1, "2")]


def test_byte_order_mark_and_unicode(tokenizer: Any, write: Write) -> None:
    prompts = load(tokenizer, write(b'\xef\xbb\xbf{"input": "1 \xc3\xa9"}', b'{"input": "2"}\r'))
    assert [p.text for p in prompts] == ["1 é", "2"]


def test_parquet_folder_and_saved_dataset(
    tokenizer: Any, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"input": "1", "label": 1.5, "metadata": {"k": "v"}}, {"input": "2", "label": 2.5, "metadata": {"k": "w"}}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "p.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"dev": table}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "folder").mkdir()
    write(*rows, name="folder/train.jsonl")
    options = {"label_key": "label"}
    for path, split in (("p.parquet", "train"), ("saved", "train"), ("splits", "dev"), ("folder", "train")):
        prompts = load(tokenizer, f"{tmp_path / path}@[-1:]", split=split, **options)
        assert [(p.text, p.label, p.metadata) for p in prompts] == [("2", 2.5, {"k": "w"})]
        assert prompts[0].source == f"{tmp_path / path}[1]"
    with pytest.raises(DataError, match=r"no split 'train' \(data.split\); it has: dev"):
        load(tokenizer, str(tmp_path / "splits"))


# ---- lengths ----


def test_overlong_prompts_are_dropped_truncated_or_refused(tokenizer: Any, write: Write) -> None:
    path = write({"input": "1"}, {"input": "1 2 3 4"}, {"input": "5 6"}, {"input": "1 2 3 4 5"})
    dropped = load(tokenizer, path, context=13, response=10)  # room for 3, <s> counted
    assert ([p.text for p in dropped], [p.index for p in dropped], dropped.dropped) == (["1", "5 6"], [0, 1], 2)
    assert dropped.notice == "data: dropped 2 of 4 prompts longer than 3 tokens"
    cut = load(tokenizer, path, context=13, response=10, overlong="truncate")
    assert [words(p.tokens) for p in cut] == ["<s> 1", "2 3 4", "<s> 5 6", "3 4 5"]
    assert (cut[1].text, cut.truncated, cut.dropped) == ("2 3 4", 2, 0)
    assert cut.notice == "data: truncated 2 of 4 prompts to their last 3 tokens"
    with pytest.raises(
        DataError,
        match=r"train.jsonl:2: the prompt has 5 tokens, the limit is 3 \(the model's context of 13 less "
        r"rollout.max_response_tokens = 10\): lower rollout.max_response_tokens, or set .*\(and 1 more bad row\)",
    ):
        load(tokenizer, path, context=13, response=10, overlong="error")
    assert load(tokenizer, path).notice == ""


def test_the_limit_is_the_smaller_of_the_key_and_what_the_context_leaves(tokenizer: Any, write: Write) -> None:
    path = write({"input": "1"})
    assert load(tokenizer, path, max_prompt_tokens=7).limit == 7
    assert load(tokenizer, path, max_prompt_tokens=95).limit == 90
    with pytest.raises(DataError, match=r"rollout.max_response_tokens = 10 of the model's context of 10 tokens"):
        load(tokenizer, path, context=10)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_prompt_tokens": 3}, r"3 \(data.max_prompt_tokens\): raise it, or set"),
        ({"context": 13}, r"3 \(the model's .* of 13 less .* = 10\): lower rollout.max_response_tokens, or set"),
        ({"context": 13, "max_prompt_tokens": 3}, r"3 \(the model's .*\): lower rollout.max_response_tokens, or set"),
        ({"context": 4, "response": 1}, r"3 \(the model's context of 4 less .* = 1\): set"),
    ],
)
def test_a_fully_filtered_set_says_by_how_much_and_what_binds(
    tokenizer: Any, write: Write, limits: dict[str, int], message: str
) -> None:
    path = write({"input": "1 2 3 4"}, {"input": "1 2 3"})
    start = r"train.jsonl:1: all 2 prompts are too long: the shortest, .*jsonl:2, has 4 tokens, the limit is "
    with pytest.raises(DataError, match=f"{start}{message} data.overlong = 'truncate'"):
        load(tokenizer, path, **limits)


# ---- what can be wrong ----

BAD_ROWS = [
    (b"{broken", {}, r"train.jsonl:2: not valid JSON: .* at column 2: one JSON object a line"),
    (b'["a"]', {}, r"train.jsonl:2: a row must be a JSON object, found a list"),
    (b'{"input": "\xff"}', {}, r"train.jsonl:2: not UTF-8 at byte 11"),
    (
        {"inptu": "1", "x": 1},
        {},
        r":2: no field 'input' \(did you mean 'inptu'\?\): set data.input_key .* has: inptu, x",
    ),
    ({"input": 3}, {}, r":2: field 'input' \(data.input_key\) must be a string or a list .* found a number"),
    ({"input": None}, {}, r":2: field 'input' .* found null"),
    ({"input": ""}, {}, r":2: field 'input' \(data.input_key\) is empty"),
    ({"input": "1"}, {"label_key": "label"}, r":2: no field 'label': set data.label_key"),
    ({"input": "1", "label": None}, {"label_key": "label"}, r":2: field 'label' \(data.label_key\) is null: give"),
    (
        {"input": "1", "metadata": "x"},
        {},
        r":2: field 'metadata' \(data.metadata_key\) must be an object, found a string",
    ),
    ({"input": "1", "tools": {"a": 1}}, {}, r":2: field 'tools' \(data.tool_key\) must be a list, found an object"),
    (
        {"input": [{"role": "user", "content": "1"}]},
        {},
        r":2: .* holds chat messages: set data.apply_chat_template = true",
    ),
    ({"input": []}, {"apply_chat_template": True}, r":2: .* is an empty list of messages"),
    ({"input": ["1"]}, {"apply_chat_template": True}, r":2: .*message 1 must be an object with 'role' and 'content'"),
    ({"input": [{"role": "user"}]}, {"apply_chat_template": True}, r":2: .*message 1 has no text in 'content'"),
    (
        {"input": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
        {"apply_chat_template": True},
        r":2: .* ends with an assistant message, which would give the answer away",
    ),
]


@pytest.mark.parametrize(("row", "options", "message"), BAD_ROWS)
def test_bad_rows_are_named(tokenizer: Any, write: Write, row: Any, options: dict[str, Any], message: str) -> None:
    path = write({"input": "1", "label": 1}, row)
    with pytest.raises(DataError, match=message) as caught:
        load(tokenizer, path, **options)
    assert "\n" not in str(caught.value)
    assert "more bad row" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"input": "1", "n": %s}' % (b"7" * 5000), r":2: not usable JSON: .*: write long numbers as strings"),
        (b'{"input": "1 \\ud83d"}', r":2: field 'input' .*lone surrogate such as \\ud800.*: correct or remove"),
        ({"input": "1", "metadata": '{"a": ' + "7" * 5000 + "}"}, r":2: .*must be an object, found a string"),
        ({"input": "1", "metadata": "[" * 100_000}, r":2: .*must be an object, found a string"),
    ],
    ids=["number too long", "half a character", "metadata with such a number", "metadata nested too deep"],
)
def test_rows_that_python_or_a_tokenizer_does_not_take(tokenizer: Any, write: Write, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(tokenizer, write({"input": "1"}, row))
    assert len(str(caught.value)) < 1000


def test_the_first_bad_row_is_told_and_the_others_counted(tokenizer: Any, write: Write) -> None:
    path = write({"input": "1"}, {"x": 1}, b"{", {"input": "2"}, {"input": 3})
    with pytest.raises(DataError, match=r"train.jsonl:2: no field 'input'.* \(and 2 more bad rows\)$"):
        load(tokenizer, path)


def test_a_template_that_raises_names_the_row(tokenizer: Any, write: Write) -> None:
    tokenizer.chat_template = "{{ raise_exception('only one message') }}"
    with pytest.raises(DataError, match=r"train.jsonl:1: the chat template failed: TemplateError: only one message"):
        load(tokenizer, write({"input": "1"}), apply_chat_template=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system_prompt": "be brief"}, r"data.system_prompt needs the chat template: set data.apply_chat_template"),
        ({"chat_template_kwargs": {"a": 1}}, r"data.chat_template_kwargs needs the chat template"),
        ({"apply_chat_template": True, "chat_template_kwargs": {"tokenize": True}}, r"'tokenize' is set by LightRL"),
        ({"metadata_key": "meta"}, r"no row has a field 'meta' \(data.metadata_key\)"),
        ({"tool_key": "functions"}, r"no row has a field 'functions' \(data.tool_key\)"),
    ],
)
def test_keys_that_cannot_work(tokenizer: Any, write: Write, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(tokenizer, write({"input": "1"}), **options)


def test_a_tokenizer_without_a_template(tokenizer: Any, write: Write) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"data.apply_chat_template = true, but the tokenizer has no chat template"):
        load(tokenizer, write({"input": "1"}), apply_chat_template=True)


def test_paths_that_cannot_work(tokenizer: Any, write: Write, tmp_path: Path) -> None:
    path = write({"input": "1"})
    write(name="empty.jsonl")
    write(b'[{"input": "1"},', b'{"input": "2"}]', name="array.json")
    (tmp_path / "notes.txt").write_text("1")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 not really")
    for name, message in [
        ("trian.jsonl", r"trian.jsonl: no such file or folder \(data.path\) \(did you mean 'train.jsonl'\?\)"),
        ("empty.jsonl", r"empty.jsonl: no rows: it is empty, or has blank lines only"),
        ("train.jsonl[:2]", r"train.jsonl\[:2\]: no such file .*; rows of one are named .*train.jsonl@\[:2\]$"),
        ("array.json", r"array.json:1: .*looks like a JSON array: write one object a line"),
        ("notes.txt", r"notes.txt: unknown kind of file '.txt'"),
        ("torn.parquet", r"torn.parquet: cannot be loaded: .*: check data.path$"),
        ("train.jsonl@[a:]", r"bad slice '@\[a:\]': write path@\[start:stop\]"),
        ("train.jsonl@[1]", r"bad slice"),
        ("train.jsonl@[0:4:2]", r"bad slice"),
        ("train.jsonl@[5:]", r"train.jsonl@\[5:\]: the slice is empty: there are 1 rows"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            load(tokenizer, str(Path(path).parent / name))
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data.path is not set"):
        load(tokenizer, "")
    for name in (" ", "a\0b"):
        with pytest.raises(DataError, match=r"data.path: .* names no file"):
            load(tokenizer, [path, name])


def test_a_missing_hub_dataset_is_one_line(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError(f"no hub\nfor {args}, split {kwargs['split']}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    expected = (
        r"^someone/thing:main: cannot be loaded from the hub .*ConnectionError: no hub for "
        r"\('someone/thing', 'main'\), split test: check data.path and data.split$"
    )
    with pytest.raises(DataError, match=expected):
        load(tokenizer, "someone/thing:main@[:3]", split="test")
