"""The configuration of on-policy distillation: the teachers, their prompts, and the form of the
loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from gspo_megatron.config.section import HubPath, Section, SuiteName, Text, harmless, shapes

FORMS = ("reverse_kl", "forward_kl_topk", "reverse_kl_topk")
TOP_K = 20  # without --max-logprobs, a vLLM server gives at most this many log-probs for a token
MOST_CANDIDATES = 1024  # the largest top_k: 8 KB a token

_FOLDER = (
    "Hugging Face folder of a teacher, or ORG/NAME[@REVISION] of the Hub, with the policy's shape "
    "and tokenizer; the training ranks compute its log-probs; null: none"
)
_URL = (
    "a server with a teacher of any shape and the policy's tokenizer, up to /v1: vLLM, or one "
    "with its prompt_logprobs and /tokenize; null: none"
)


class TeacherSection(Section):
    """One of several teachers. If neither key is set, its prompts have no teacher."""

    teacher: HubPath | None = shapes(None, _FOLDER)
    url: Text | None = harmless(None, _URL)


class DistillationSection(Section):
    """A teacher that judges each token of the responses."""

    teacher: HubPath | None = shapes(None, _FOLDER)
    url: Text | None = harmless(None, _URL)
    coefficient: float = shapes(
        1.0,
        "weight of the teacher's advantages, which are added to the advantages of the rewards, or "
        "of the teacher's loss",
        gt=0,
    )
    form: Literal[FORMS] = shapes(  # ty: ignore[invalid-type-form]
        "reverse_kl",
        "reverse_kl: the log-ratio of teacher and policy on the policy's tokens, as an advantage; "
        "forward_kl_topk, reverse_kl_topk: KL(teacher, policy) or KL(policy, teacher) over the "
        "teacher's top_k tokens and the rest, as a loss",
    )
    top_k: int = shapes(
        TOP_K,
        "number of the teacher's most probable tokens that a form with topk uses at each position; "
        "a vLLM server gives 20, and more with --max-logprobs",
        ge=1,
        le=MOST_CANDIDATES,
    )
    field: Text | None = shapes(
        None, "the field of a prompt's row that names its teacher, one of teachers"
    )
    teachers: dict[SuiteName, TeacherSection] = shapes(
        {},
        "several teachers by name, each with teacher or url; NAME: {} stands for prompts "
        "that have no teacher",
    )

    @property
    def named(self) -> dict[str, TeacherSection]:
        """All teachers by name. A teacher for all prompts has the name ""."""
        if self.teachers or (self.teacher is None and self.url is None):
            return self.teachers
        return {"": TeacherSection(teacher=self.teacher, url=self.url)}

    @property
    def folders(self) -> dict[int, str]:
        """The folders of teachers that run on the training ranks, by their numbers in `named`."""
        every = enumerate(self.named.values())
        return {number: each.teacher for number, each in every if each.teacher is not None}

    @property
    def urls(self) -> dict[int, str]:
        """The URLs of teachers behind a server, by their numbers in `named`."""
        every = enumerate(self.named.values())
        return {number: each.url for number, each in every if each.url is not None}

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.folders or self.urls)

    @property
    def candidates(self) -> int:
        """The number of the teacher's most probable tokens that the form reads at each
        position."""
        return 0 if self.form == "reverse_kl" else self.top_k

    def key_of(self, number: int, key: str) -> str:
        """Return the full name of a teacher's key `teacher` or `url`."""
        name = [*self.named][number]
        return (
            f"objective.distillation.teachers.{name}.{key}"
            if name
            else f"objective.distillation.{key}"
        )


def distillation_problems(given: DistillationSection) -> Iterator[tuple[str, Any, str]]:
    """Yield the problems of the section: the key below objective.distillation, its value, and what
    is wrong."""
    if not given.is_on:
        why = "nothing reads it without objective.distillation.teacher or url"
        for name, wrong in given.unread(("coefficient", "form"), why):
            yield name, getattr(given, name), wrong
    if given.form == "reverse_kl" and given.top_k != TOP_K:
        wrong = "nothing reads it with objective.distillation.form = reverse_kl"
        yield "top_k", given.top_k, f"{wrong}; allowed: {TOP_K}, or a form with topk"
    if given.teacher is not None and given.url is not None:
        wrong = "there is a teacher already, distillation.teacher; allowed: null"
        yield "url", given.url, wrong
    if not given.teachers:
        if given.field is not None:
            wrong = "there are no objective.distillation.teachers; allowed: null"
            yield "field", given.field, wrong
        return
    if given.field is None:
        wrong = "objective.distillation.teachers needs the field that names a prompt's teacher"
        yield "field", None, f"{wrong}; allowed: the name of a field"
    for name in ("teacher", "url"):
        if getattr(given, name) is not None:
            wrong = "objective.distillation.teachers names the teachers; allowed: null"
            yield name, getattr(given, name), wrong
    for name, each in given.teachers.items():
        if each.teacher is not None and each.url is not None:
            wrong = f"there is a teacher already, teachers.{name}.teacher; allowed: null"
            yield f"teachers.{name}.url", each.url, wrong
    if not given.is_on:
        wrong = "none of them has teacher or url; allowed: at least one that has"
        yield "teachers", ", ".join(given.teachers), wrong
