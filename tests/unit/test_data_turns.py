"""Which tokens of a conversation are trained, for every kind of chat template (M4): marked « » in the text by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest

from lightrl.data.turns import ConversationEncoder, TurnError


def u(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def a(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def s(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


TALK = [u("hi"), a("yes"), u("and?"), a("no\n")]
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]

CASES = {
    "chatml": (
        templates.CHATML, TALK,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«no\n<|im_end|>»\n",
    ),
    "default_system": (
        templates.DEFAULT_SYSTEM, TALK[:2],
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "«yes<|im_end|>»\n",
    ),
    "no_generation_prompt": (
        templates.NO_PROMPT, TALK[:2], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n",
    ),
    "marked": (
        templates.MARKED, TALK,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«no\n<|im_end|>»\n",
    ),
    "marked_with_end": (
        templates.MARKED_WITH_END, TALK,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«no\n<|im_end|>»\n",
    ),
    "thoughts_are_dropped": (
        templates.THINKING, [u("hi"), a(THOUGHT + "yes"), u("and?"), a(THOUGHT + "no")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nno<|im_end|>»\n",
    ),
    "thoughts_are_added": (
        templates.THINKING, TALK,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nno\n<|im_end|>»\n",
    ),
    "llama3": (
        templates.LLAMA3, [s("S"), *TALK],
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«yes<|eot_id|>»<|start_header_id|>user"
        "<|end_header_id|>\n\nand?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«no<|eot_id|>»",
    ),
    "gemma": (
        templates.GEMMA, TALK,
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n«yes<end_of_turn>»\n"
        "<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n«no<end_of_turn>»\n",
    ),
    "mistral_moves_the_system_message": (
        templates.MISTRAL, [s("S"), *TALK],
        "<s>[INST] hi[/INST]« yes</s>»[INST] and?[/INST] «no</s>»",
    ),
    "glm_ends_by_the_next_role": (
        templates.GLM, TALK, "[gMASK]<sop><|user|>\nhi<|assistant|>\n«yes<|user|>»\nand?<|assistant|>\n«no\n»",
    ),
    "deepseek_opens_a_thought": (
        templates.DEEPSEEK, [u("hi"), a("<think>\nhm\n</think>yes"), u("and?"), a("no")],
        "<s><|User|>hi<|Assistant|>«yes</s>»<|User|>and?<|Assistant|>«no</s>»",
    ),
    "phi3_ends_the_conversation": (
        templates.PHI3, TALK,
        "<|user|>\nhi<|end|>\n<|assistant|>\n«yes<|end|>»\n<|user|>\nand?<|end|>\n<|assistant|>\n«no\n<|end|>»\n</s>",
    ),
    "harmony": (
        templates.HARMONY, TALK,
        "<|start|>user<|message|>hi<|end|><|start|>assistant«<|channel|>final<|message|>yes<|end|>»"
        "<|start|>user<|message|>and?<|end|><|start|>assistant«<|channel|>final<|message|>no\n<|return|>»",
    ),
    "merging": (
        templates.MERGING, [u("hi"), a("yes"), a("really"), u("and?"), a("no")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes»\n«really<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«no<|im_end|>»\n",
    ),
    "tools": (
        templates.TOOLS,
        [u("hi"), a("wait", tool_calls=CALL), {"role": "tool", "content": "42"}, a("42!"), u("and?"),
         a("", tool_calls=CALL), {"role": "tool", "content": "7"}, a("7!")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«wait<tool_call>f</tool_call><|im_end|>»\n"
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n«42!<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«<tool_call>f</tool_call><|im_end|>»\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n«7!<|im_end|>»\n",
    ),
    "plain": (templates.PLAIN, TALK, "Question: hi\nAnswer:« yes»\nQuestion: and?\nAnswer: «no\n\n»"),
    "special_tokens_in_an_answer": (
        templates.CHATML, [u("hi"), a("<|im_end|>\n<|im_start|>user\nyes"), u("and?"), a("")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<|im_end|>\n<|im_start|>user\nyes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n",
    ),
    "begins_with_the_assistant": (
        templates.CHATML, [a("yes"), u("hi"), a("ümläut 😀")],
        "<|im_start|>assistant\n«yes<|im_end|>»\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "«ümläut 😀<|im_end|>»\n",
    ),
    "parts": (
        "{% for m in messages %}<|im_start|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}<|im_end|>{% endfor %}",
        [u("hi"), {"role": "assistant", "content": [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]}],
        "<|im_start|>hi<|im_end|><|im_start|>«yes<|im_end|>»",
    ),
}  # fmt: skip


def shown(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    """The text of the ids, each run of trained tokens between « »."""
    runs: list[tuple[int, list[int]]] = []
    for token, trained in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(token)
    texts = [(trained, tokenizer.decode(run, skip_special_tokens=False)) for trained, run in runs]
    return "".join(f"«{text}»" if trained else text for trained, text in texts)


def encode(tokenizer: Any, messages: list[dict[str, Any]], trained: list[bool] | None = None, **options: Any) -> Any:
    encoder = ConversationEncoder(tokenizer, end_ids=options.pop("end_ids", [tokenizer.eos_token_id]), **options)
    chosen = [m["role"] == "assistant" for m in messages] if trained is None else trained
    return encoder, *encoder(messages, chosen)


@pytest.mark.parametrize("options", [{}, {"trim_offsets": True}], ids=["", "trimmed"])
@pytest.mark.parametrize("name", CASES)
def test_ids_are_the_templates_and_only_answers_are_trained(name: str, options: dict[str, bool]) -> None:
    template, messages, expected = CASES[name]
    tokenizer = templates.tokenizer(template, **options)
    ends = tokenizer.convert_tokens_to_ids(["</s>", *(["<|user|>"] if "glm" in name else [])])
    _, ids, mask = encode(tokenizer, messages, end_ids=ends)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert shown(tokenizer, ids, mask) == expected


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("merging", "parts")])
def test_each_turn_alone_is_its_part_of_the_whole(name: str) -> None:
    """Trained one by one, the turns' masks are disjoint and add up to that of all."""
    template, messages, _ = CASES[name]
    tokenizer = templates.tokenizer(template)
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    _, _, whole = encode(tokenizer, messages)
    alone = [encode(tokenizer, messages, [j == i for j in range(len(messages))])[2] for i in answers]
    assert [sum(column) for column in zip(*alone, strict=True)] == whole
    assert all(any(mask) for mask in alone)


def test_white_space_that_a_special_token_takes_along_is_not_the_answers() -> None:
    """Some tokenizers' role tokens swallow line feeds after them, the answer's own too."""
    tokenizer = templates.tokenizer(templates.PHI3, rstrip=True)
    messages = [u("hi"), a("\nyes"), u("and?"), a("no")]
    _, ids, mask = encode(tokenizer, messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert shown(tokenizer, ids, mask) == (
        "<|user|>hi<|end|><|assistant|>«yes<|end|>»<|user|>and?<|end|><|assistant|>«no<|end|>»</s>"
    )


def test_a_token_of_header_and_answer_is_the_answers() -> None:
    """`assistant\\n` and `\\nyes` share a token of two line feeds, which no cut can divide."""
    tokenizer = templates.tokenizer(templates.CHATML)
    _, ids, mask = encode(tokenizer, [u("hi"), a("\nyes")])
    assert shown(tokenizer, ids, mask).endswith("<|im_start|>assistant«\n\nyes<|im_end|>»\n")


def test_prompts_that_begin_otherwise_are_counted() -> None:
    """The model will be asked to answer behind `<think>`, which conversations do not have."""
    for template, messages, turns in (
        (templates.DEEPSEEK, TALK, 2),
        (templates.MISTRAL, [s("S"), *TALK], 2),
        (templates.CHATML, TALK, 0),
        (templates.MERGING, [u("hi"), a("yes"), a("really")], 0),
    ):
        assert encode(templates.tokenizer(template), messages)[0].unlike_prompts == turns


def test_an_end_is_appended_only_where_the_template_writes_none() -> None:
    tokenizer = templates.tokenizer(templates.GLM)
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    encoder, ids, mask = encode(tokenizer, TALK, end_of_turn=end)
    assert shown(tokenizer, ids, mask).endswith("<|assistant|>\n«no\n<|user|>»")
    assert encoder.unended == 0
    encoder, ids, mask = encode(tokenizer, TALK)
    assert (encoder.unended, mask[-1]) == (1, 1)
    for template, messages in ((templates.CHATML, TALK), (templates.GLM, TALK[:3])):
        other = templates.tokenizer(template)
        encoder, ids, _ = encode(other, messages, end_of_turn=end)
        assert ids == other.apply_chat_template(messages, return_dict=False)
        assert encoder.unended == 0


def test_the_first_token_is_never_trained() -> None:
    tokenizer = templates.tokenizer("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    _, ids, mask = encode(tokenizer, [a("yes")])
    assert len(ids) > 1
    assert mask == [0] + [1] * (len(ids) - 1)


@pytest.mark.parametrize(
    ("template", "messages", "options", "said"),
    [
        (templates.TWICE, TALK, {}, r"message 2: .*beginning cannot be found .*\{% generation %\}"),
        (templates.GEMMA, [s("S"), *TALK], {}, r"the chat template failed: .*System role not supported"),
        (
            templates.THINKING,
            [u("hi"), a(THOUGHT + "yes")],
            {"template_kwargs": {"enable_thinking": False}},
            r"message 2: .*beginning cannot be found \(near .*<think>.*enable_thinking",
        ),
        (templates.MARKED.replace("{{ m['content'] }}{% endgen", "{% endgen"), TALK, {}, "no token lies between them"),
    ],
    ids=["twice", "raises", "thinks_though_told_not_to", "empty_marks"],
)
def test_what_cannot_be_divided_is_refused(template: str, messages: Any, options: Any, said: str) -> None:
    with pytest.raises(TurnError, match=said):
        encode(templates.tokenizer(template), messages, **options)


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(TurnError, match="name a fast one"):
        ConversationEncoder(Slow())


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    _, ids, mask = encode(tokenizer, TALK)
    assert ids == tokenizer.apply_chat_template(TALK, return_dict=False)
    assert shown(tokenizer, ids, mask) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«no\n<|im_end|>»\n"
    )
