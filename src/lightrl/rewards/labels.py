"""Labels checked when a run starts: a row that no answer could get right is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightrl.config.schema import RewardConfig
from lightrl.errors import UserError
from lightrl.rewards.answer import Answer
from lightrl.rewards.pool import LimitError, WorkerError, WorkerPool
from lightrl.rewards.registry import Rule, find_rule, function_of
from lightrl.rewards.scorer import pool_size, rule_name
from lightrl.types import Prompt


def check_labels(prompts: Iterable[Prompt], config: RewardConfig) -> None:
    """Check that every row has a rule, and a label which that rule can grade against.

    Raises UserError with `file:line` of the first bad row and the number of others. Labels that repeat are checked
    once; those that need a parser go to worker processes.
    """
    problems: list[_Problem] = []
    unsure: dict[str, tuple[int, Prompt, str, Rule]] = {}
    for position, prompt in enumerate(prompts):
        try:
            name = rule_name(prompt, config)
            rule = find_rule(name)[0] if name is not None else None
        except UserError as error:
            text = str(error)
            text = text if text.startswith(f"{prompt.source}:") else f"{prompt.source}: {text}"
            problems.append(_Problem(position, text))
            continue
        if name is None or rule is None or rule.check is None:
            continue
        key = f"{rule.check}\0{type(prompt.label).__name__}\0{prompt.label}"
        if rule.isolated:
            if not _is_integer(prompt.label):
                unsure.setdefault(key, (position, prompt, name, rule))
        elif (problem := _checked(position, prompt, name, rule)) is not None:
            problems.append(problem)
    problems += _checked_in_workers(list(unsure.values()), config)
    if not problems:
        return
    first, more = min(problems, key=lambda p: p.position), len(problems) - 1
    raise UserError(first.text + (f" (and {more} more such row{'s' * (more > 1)})" if more else ""))


@dataclass(frozen=True)
class _Problem:
    position: int
    text: str


def _checked(position: int, prompt: Prompt, name: str, rule: Rule) -> _Problem | None:
    assert rule.check is not None
    try:
        function_of(rule.check)(Answer(response="", label=prompt.label, metadata=prompt.metadata))
    except ValueError as error:
        return _problem(position, prompt, name, str(error))
    except Exception as error:  # metadata of a kind that the rule does not expect
        return _problem(position, prompt, name, f"the row cannot be graded ({type(error).__name__}: {error})")
    return None


def _checked_in_workers(rows: list[tuple[int, Prompt, str, Rule]], config: RewardConfig) -> list[_Problem]:
    if not rows:
        return []
    size = min(pool_size(config.concurrency), len(rows))
    pool = WorkerPool(size)

    def check(row: tuple[int, Prompt, str, Rule]) -> _Problem | None:
        position, prompt, name, rule = row
        assert rule.check is not None
        answer = Answer(response="", label=prompt.label, metadata=prompt.metadata)
        try:
            pool.call(rule.check, answer, config.timeout)
        except LimitError as error:
            text = f"the label {str(prompt.label)[:80]!r} is too much for the parser, which {error}"
            return _problem(position, prompt, name, text)
        except WorkerError as error:
            return _problem(position, prompt, name, str(error).removeprefix("ValueError: "))
        return None

    try:
        with ThreadPoolExecutor(size) as threads:
            return [problem for problem in threads.map(check, rows) if problem is not None]
    finally:
        pool.close()


def _problem(position: int, prompt: Prompt, name: str, text: str) -> _Problem:
    hint = ": set data.label_key" if prompt.label is None else ""
    return _Problem(position, f"{prompt.source}: {text}{hint} (reward rule {name!r}): correct or remove the row")


def _is_integer(label: object) -> bool:
    """Most labels: no worker has to start for them."""
    text = str(label).strip() if isinstance(label, str | int) and not isinstance(label, bool) else ""
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()
