"""Tasks of EleutherAI's lm-evaluation-harness, an optional extra that is imported when it is called for."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import numbers
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptfast.errors import UserError
from gptfast.session import Session

Tasks = dict[str, dict[str, Any]]
"""The harness's own objects, by name: the leaves under `tasks`, what they are grouped in under `groups`."""


@dataclass(frozen=True)
class TaskMetric:
    """One figure of a task, or of a group over its tasks, as the harness names and computes it.

    Attributes:
        task, version: which task, in which wording.
        metric, filter: what was computed, from the answer as `filter` cut it out of the model's text.
        value, standard_error: in the metric's own unit; no error where the harness computes none.
        num_fewshot: solved examples before each question; None for a group whose tasks differ.
        questions: how many were asked.
    """

    task: str
    version: str | None
    metric: str
    filter: str
    value: float
    standard_error: float | None
    num_fewshot: int | None
    questions: int | None


def load_tasks(names: Sequence[str], include_path: Path | None = None) -> Tasks:
    """Find tasks, groups or tags by name and load their data, from the Hugging Face hub where it is not at hand.

    `include_path` is a directory of further task files. Raises UserError if the harness is not installed, or as
    `select_tasks` does.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError('lm-eval is not installed; install it with pip install "gptfast[lm-eval]"')
    from lm_eval.tasks import TaskManager

    return select_tasks(TaskManager(include_path=include_path), names)


def select_tasks(manager: Any, names: Sequence[str]) -> Tasks:
    """What the harness's `TaskManager` knows by these names.

    Raises UserError if a name is unknown, a task is asked for twice, its data or packages cannot be had, or it needs
    what is not done here.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UserError(
            f"lm-eval knows no task {unknown[0]!r}; `lm-eval ls tasks` lists what there is, and --include-path adds "
            "a directory of task files"
        )
    # Some tasks shuffle their choices when they are loaded.
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    tasks: Tasks = {"tasks": {}, "groups": {}}
    for name in names:
        loaded = load_task(manager, name)
        for leaf, task in loaded["tasks"].items():
            if leaf in tasks["tasks"]:
                raise UserError(f"task {leaf} is asked for twice, the second time by {name}; leave out one of the two")
            check_task(leaf, task)
        tasks = {kind: tasks[kind] | loaded[kind] for kind in tasks}
    return tasks


def load_task(manager: Any, name: str) -> Tasks:
    """What the harness's `TaskManager.load` returns for one name."""
    try:
        with output_kept_apart():
            loaded: Tasks = manager.load(name)
    except (OSError, ImportError) as error:
        raise UserError(
            f"task {name} cannot be loaded: {' '.join(str(error).split())}; check the connection to the Hugging Face "
            "hub, or install what the task needs"
        ) from error
    return loaded


def check_task(name: str, task: Any) -> None:
    """Raise UserError if the task needs images, or runs code that the model writes."""
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"task {name} shows images, which these models cannot see; leave it out")
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"task {name} would run code that the model writes, which is not done here; leave it out")


def run_tasks(
    session: Session, tasks: Tasks, *, limit: int | None = None, num_fewshot: int | None = None
) -> list[TaskMetric]:
    """Answer the questions of the tasks with a session of batch size 1, and let the harness score the answers.

    Args:
        session: of a checkpoint, which has a tokenizer.
        tasks: from `load_tasks`.
        limit: ask only the first so many questions of each task.
        num_fewshot: put so many solved examples before each question; None leaves it to the task.

    Raises:
        UserError: a task asks for what the model or this runtime cannot do.
    """
    import lm_eval

    from gptfast.evaluation.adapter import SessionModel

    for task in tasks["tasks"].values():
        set_fewshot(task, num_fewshot)
    with output_kept_apart():
        results = lm_eval.evaluate(SessionModel(session), tasks, limit=limit, log_samples=False)
    return list(collect_metrics(results))


def set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples as the harness's own command does: a task that says 0 itself keeps to it.

    Its `simple_evaluate` would do that, but it also asks git for the version of the user's own directory.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    own = task.get_config("num_fewshot")
    if own is None or (own != 0 and num_fewshot is not None):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


@contextlib.contextmanager
def output_kept_apart() -> Iterator[None]:
    """Within, what is printed goes to standard error: the harness's remarks are no result of ours."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def collect_metrics(results: Mapping[str, Any]) -> Iterator[TaskMetric]:
    """The figures in what `simple_evaluate` returned, task by task."""
    for task, figures in results["results"].items():
        version = results["versions"].get(task)
        for key, value in figures.items():
            metric, comma, cut = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, numbers.Real):
                continue
            error = figures.get(f"{metric}_stderr,{cut}")
            yield TaskMetric(
                task=task,
                version=None if version is None else str(version),
                metric=metric,
                filter=cut,
                value=float(value),
                standard_error=float(error) if isinstance(error, numbers.Real) and math.isfinite(error) else None,
                num_fewshot=results["n-shot"].get(task),
                questions=figures.get("sample_len"),
            )
