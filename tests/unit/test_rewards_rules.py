"""What each rule gives, as a table: (rule, response, label, reward). Cases R1-R3."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lightrl.rewards.answer import Answer
from lightrl.rewards.box import last_box
from lightrl.rewards.registry import BOXED, RULES, find_rule, function_of


def grade(name: str, response: str, label: Any, **fields: Any) -> Any:
    """As the scorer does, in this process."""
    rule, boxed = find_rule(name)
    box = last_box(response) if boxed else response
    if box is None:
        return rule.worst
    value = function_of(rule.grade)(Answer(response=box, label=label, boxed=boxed, **fields))
    return value["score"] if isinstance(value, dict) else value


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)


TABLE: list[tuple[str, str, Any, float]] = [
    # the last complete box
    ("math", r"So \boxed{5}.", "5", 1),
    ("math", r"So \boxed{4}.", "5", 0),
    ("math", r"\boxed{5}", 5, 1),
    ("math", r"\boxed{5}", 5.0, 1),
    ("math", r"first \boxed{1}, no: \boxed{2}", "2", 1),
    ("math", r"first \boxed{2}, no: \boxed{1}", "2", 0),
    ("math", r"\boxed{2} and then \boxed{1", "2", 1),
    ("math", r"{{{ \boxed{5}", "5", 1),
    ("math", r"\boxed{\boxed{5}}", "5", 1),
    ("math", r"\fbox{5}", "5", 1),
    ("math", r"\boxed{4} \fbox{5}", "5", 1),
    ("math", r"\boxed{\fbox{5}}", "5", 1),
    ("math", r"$\boxed 5$", "5", 1),
    ("math", r"\boxed {5}", "5", 1),
    ("math", r"\boxed{}", "5", 0),
    ("math", r"put it into \boxed{}. 5", "5", 0),
    # without a box: what math-verify finds
    ("math", "the answer is 5", "5", 1),
    ("math", r"12 apples; the final answer is $\frac{3}{4}$.", "0.75", 1),
    ("math", "Answer: 3,000", "3000", 1),
    ("math", "no idea", "5", 0),
    ("math", "", "5", 0),
    # fractions, decimals, percent, commas, units, signs
    ("math", r"\boxed{\frac{1}{2}}", "0.5", 1),
    ("math", r"\boxed{\dfrac12}", "1/2", 1),
    ("math", r"\boxed{\frac{\frac{1}{2}}{2}}", r"\frac{1}{4}", 1),
    ("math", r"\boxed{4\frac{2}{3}}", "14/3", 1),
    ("math", r"\boxed{0.333}", "1/3", 0),
    ("math", r"\boxed{50\%}", "0.5", 1),
    ("math", r"\boxed{50\%}", "50", 1),
    ("math", r"\boxed{1,234}", "1234", 1),
    ("math", r"\boxed{1{,}000}", "1000", 1),
    ("math", r"\boxed{1\,000\,000}", "1000000", 1),
    ("math", r"\boxed{5\text{ cm}}", "5", 1),
    ("math", r"\boxed{5^\circ}", "5", 1),
    ("math", r"\boxed{\$5.00}", "5", 1),
    ("math", r"\boxed{−7}", "-7", 1),
    ("math", r"\boxed{7}", "-7", 0),
    ("math", r"\boxed{5.}", "5", 1),
    # expressions, equations
    ("math", r"\boxed{x=5}", "5", 1),
    ("math", r"\boxed{x^2-1}", "(x-1)(x+1)", 1),
    ("math", r"\boxed{\sqrt{2}/2}", r"\frac{1}{\sqrt2}", 1),
    ("math", r"\boxed{3 \times 10^4}", "30000", 1),
    ("math", r"\boxed{3.14}", r"\pi", 0),
    # intervals, sets, tuples, several answers
    ("math", r"\boxed{[0,1)}", "[0,1)", 1),
    ("math", r"\boxed{(0,1)}", "[0,1)", 0),
    ("math", r"\boxed{x \in [1,2]}", "[1,2]", 1),
    ("math", r"\boxed{(-\infty, 3) \cup (3, \infty)}", r"(-\infty,3)\cup(3,\infty)", 1),
    ("math", r"\boxed{\{6, 5\}}", r"\{5,6\}", 1),
    ("math", r"\boxed{5,6}", "6,5", 1),
    ("math", r"\boxed{(2,1)}", "(1,2)", 0),
    ("math", r"\boxed{5,6}", "5", 0),
    ("math", r"\boxed{5 or 6}", "5", 0),
    # words: the product n·o is not the product o·n
    ("math", r"\boxed{\text{Yes}}", "yes", 1),
    ("math", r"\boxed{on}", "no", 0),
    ("math", r"\boxed{Tuesday}", r"\text{Monday}", 0),
    ("math", r"\boxed{\text{(B)}}", "B", 1),
    # labels as datasets have them
    ("math", r"\boxed{72}", "48/2 = <<48/2=24>>24, 48+24 = 72\n#### 72", 1),
    ("math", r"\boxed{72}", r"so it is \boxed{72}.", 1),
    ("math", r"\boxed{72}", "$72$", 1),
    ("math", "x" * 1_000_000 + r"\boxed{5}", "5", 1),
    ("math", r"\boxed{" * 150_000, "5", 0),
    ("math", r"\boxed{" + "1+" * 5000 + "1}", "5001", 0),
    # deepscaler: a box after the thinking
    ("deepscaler", r"<think>\boxed{4}</think> \boxed{5}", "5", 1),
    ("deepscaler", r"<think>\boxed{5}</think> it is five", "5", 0),
    ("deepscaler", r"x</think>\boxed{4}</think>\boxed{\frac{10}{2}}", "5", 1),
    ("deepscaler", r"\boxed{4} ###Response \boxed{5}", "5", 1),
    ("deepscaler", r"</think> the answer is 5", "5", 0),
    ("deepscaler", r"no marks at all, \boxed{5}", "5", 1),
    ("deepscaler", "", "5", 0),
    # dapo: the last `Answer:` line, an integer, +1 / -1
    ("dapo", "Answer: 5", "5", 1),
    ("dapo", "answer : $5$", "5", 1),
    ("dapo", "Answer: 4\nAnswer: 5", 5, 1),
    ("dapo", "Answer: 5\nAnswer: 4", "5", -1),
    ("dapo", r"Answer: \boxed{5}", "5", 1),
    ("dapo", r"Answer: x = 1{,}000 \text{ cm}", "1000", 1),
    ("dapo", "Answer: −5", "-5", 1),
    ("dapo", "Answer: $5.$", "5.0", 1),
    ("dapo", "Answer: 5.", "5", -1),
    ("dapo", "it is 5", "5", -1),
    ("dapo", "", "5", -1),
    ("dapo", "Answer: 5" + " " * 400 + "well", "5", -1),
    # f1
    ("f1", "The cat!", "a cat", 1),
    ("f1", "the black cat sat", "a cat", 0.5),  # precision 1/3, recall 1
    ("f1", "dog", "cat", 0),
    ("f1", "yes it is", "yes", 0),
    ("f1", "", "cat", 0),
    # gpqa
    ("gpqa", "The answer is C", "C", 1),
    ("gpqa", "The answer is (C).", "c", 1),
    ("gpqa", "<think>the answer is A</think> so **B**", "B", 1),
    ("gpqa", "the answer is A. No: the answer is D", "A", 0),
    ("gpqa", "I take a look; option b", "B", 1),
    ("gpqa", "B", 1, 1),
    ("gpqa", "no idea", "C", 0),
    ("gpqa", "Answer: **C**, since A is too small", "C", 1),
    ("gpqa", "**Answer:** C. A is too small", "C", 1),
    ("gpqa", "__Answer__: (c), not A", "C", 1),
    ("gpqa", "the answer is: C, not A", "C", 1),
    ("gpqa", r"the answer is $\boxed{\text{C}}$, not A", "C", 1),
    ("gpqa", r"the answer is \(\textbf{(C)}\) and not A", "C", 1),
    ("gpqa", "**C** is correct. A is too small", "C", 1),
    ("gpqa", "the answer is a lot harder: B", "A", 0),
    # exact and number
    ("exact", " 5\n", "5", 1),
    ("exact", "It is 5", "5", 0),
    ("exact", "5", 5.0, 1),
    ("number", "4 - 1 = 3", "3", 1),
    ("number", "3 or 4", "3", 0),
    ("number", "It is 3.", 3, 1),
    ("number", "5-3", "3", 1),  # a hyphen after a digit is no sign
    ("number", "it is -3", "-3", 1),
    ("number", "−3", "-3", 1),
    ("number", "1,234.50", "1234.5", 1),
    ("number", "3.0", "3", 1),
    ("number", "three", "3", 0),
    ("number", "", "3", 0),
    ("number", "9" * 100_000, "3", 0),
    # boxed_: the box is stripped once, and what was in it is the answer
    ("boxed_dapo", r"Answer: \boxed{5}", "5", 1),
    ("boxed_dapo", "Answer: 5", "5", -1),
    ("boxed_math", r"Answer: \boxed{5}", "5", 1),
    ("boxed_math", r"\boxed{\boxed{5}}", "5", 1),
    ("boxed_math", "the answer is 5", "5", 0),
    ("boxed_deepscaler", r"\fbox{5}", "5", 1),
    ("boxed_exact", r"so \boxed{\frac{a}{b}}", r"\frac{a}{b}", 1),
    ("boxed_number", r"3 \boxed{5} 7", "5", 1),
    ("boxed_gpqa", r"A, \boxed{B}, C", "B", 1),
    ("boxed_f1", r"dog \boxed{the cat}", "cat", 1),
]


@pytest.mark.parametrize(
    ("rule", "response", "label", "reward"),
    [pytest.param(*row, id=f"{i}-{row[0]}-{row[1][:30]!r}") for i, row in enumerate(TABLE)],
)
def test_table(rule: str, response: str, label: Any, reward: float) -> None:
    assert grade(rule, response, label) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # escaped braces need not match
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} \boxed{ 2 } \boxed{3", "2"),
        (r"\boxed{a \fbox{b} c}", "b"),
        (r"\boxed 1/2.", "1/2"),
        (r"\boxed B", "B"),
        (r"write it in \boxed form", None),
        (r"\boxed{5", None),
        (r"} \boxed{5}}", "5"),
        ("\\\\boxed{5}", "5"),
        ("", None),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_number_wants_a_reply_that_ended_by_itself() -> None:
    assert grade("number", "3", "3", status="completed") == 1
    assert grade("number", "3", "3", status="truncated") == 0
    assert grade("number", "3", "3", status="aborted") == 0


def test_gpqa_reads_choices_from_metadata() -> None:
    metadata = {"choices": ["red one", "blue"]}
    assert grade("gpqa", "B", "blue", metadata=metadata) == 1
    assert grade("gpqa", "A", "blue", metadata=metadata) == 0
    assert grade("gpqa", "clearly the red one", "A", metadata=metadata) == 1
    assert grade("gpqa", "the redone", "A", metadata=metadata) == 0
    assert grade("gpqa", "Z", "x", metadata={"correct_letter": "z", "valid_letters": ["y", "z"]}) == 1
    assert grade("gpqa", "", "blue", metadata=metadata) == 0


def test_gpqa_takes_time_in_proportion_to_the_response() -> None:
    """A run of spaces once cost the square of its length: minutes, and no time limit ends one regex search."""
    spaces = " " * 40_000
    assert grade("gpqa", f"answer{spaces}!", "C") == grade("gpqa", f"A is{spaces}!", "C") == 0
    stars = "*_" * (len(spaces) // 2)
    assert grade("gpqa", f"answer{stars}!", "C") == grade("gpqa", f"A{stars}!", "C") == 0
    assert grade("gpqa", f"answer{spaces}C", "C") == grade("gpqa", f"A is{spaces}the correct", "A") == 1


def test_dapo_returns_the_answer_it_found() -> None:
    value = function_of(RULES["dapo"].grade)(Answer(response="Answer: 7 cm", label="5"))
    assert value == {"score": -1.0, "acc": False, "pred": "7"}


def test_random_is_fair_and_the_same_after_a_restart() -> None:
    draws = [grade("random", "", None, key=f"{group}/{i}") for group in range(100) for i in range(10)]
    again = [grade("random", "", None, key=f"{group}/{i}") for group in range(100) for i in range(10)]
    assert draws == again
    assert set(draws) == {0.0, 1.0}
    assert abs(sum(draws) - 500) < 64  # four standard deviations


def test_none_is_0_whatever_is_said() -> None:
    assert grade("none", "42", None) == grade("none", "", "42") == 0


BAD_LABELS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("math", None, {}, "the label is missing"),
    ("math", "", {}, "the label is empty"),
    ("f1", float("nan"), {}, "the label is nan, as tables write a missing one"),
    ("exact", float("inf"), {}, "the label is inf"),
    ("math", "$$", {}, "the label is empty"),
    ("math", "x+", {}, r"'x\+' cannot be parsed"),
    ("math", r"\frac{", {}, "cannot be parsed"),
    ("math", "???", {}, "cannot be parsed"),
    ("math", ["5"], {}, "the label is a list, not a string or a number"),
    ("math", True, {}, "the label is a bool"),
    ("deepscaler", "((", {}, "cannot be parsed"),
    ("dapo", "2.5", {}, "'2.5' is not an integer"),
    ("dapo", "five", {}, "is not an integer"),
    ("number", "3 apples", {}, "'3 apples' is not a number"),
    ("exact", " ", {}, "the label is empty"),
    ("gpqa", "K", {}, "'K' names no choice"),
    ("gpqa", 4, {"choices": ["a", "b"]}, "names no choice"),
    ("gpqa", "A", {"correct_letter": "Q"}, "is not one of A, B"),
    ("f1", None, {}, "the label is missing"),
]


@pytest.mark.parametrize(("rule", "label", "metadata", "message"), BAD_LABELS)
def test_labels_that_cannot_be_graded_against(rule: str, label: Any, metadata: dict[str, Any], message: str) -> None:
    check = RULES[rule].check
    assert check is not None
    with pytest.raises(ValueError, match=message):
        function_of(check)(Answer(response="", label=label, metadata=metadata))


def test_the_table_has_every_rule() -> None:
    assert {name.removeprefix(BOXED) for name, *_ in TABLE} == RULES.keys() - {"random", "none"}


def test_the_labels_of_the_table_pass_their_checks() -> None:
    for name, _, label, _ in TABLE:
        check = RULES[name.removeprefix(BOXED)].check
        assert check is not None
        function_of(check)(Answer(response="", label=label))
