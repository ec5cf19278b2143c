"""The recipe node ``rltr:`` as strict typed settings. Importable without torch or verl.

Unknown keys are refused with the nearest known one. A setting whose value the paper gives is marked [paper]; one the
paper leaves open is marked [ours].
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rltr_verl.errors import ConfigError


class Settings(BaseModel):
    """Base of every settings node: frozen, and no key passes unseen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolLimits(Settings):
    """Limits of one tool where they differ from those of all; null: as for all."""

    timeout_s: float | None = Field(None, gt=0, description="Wall time of one call.")
    retries: int | None = Field(None, ge=0, description="Further attempts after a fault of the surroundings.")
    concurrency: int | None = Field(None, ge=1, description="Calls at once, over all trajectories of a process.")
    cache: bool | None = Field(None, description="Whether results are kept; only for a tool that is pure.")


class RolloutSettings(Settings):
    """The planner loop."""

    max_turns: int = Field(10, ge=1, description="Assistant turns a trajectory may take [ours].")
    max_parallel_calls: int = Field(4, ge=1, description="Calls of one turn that are executed [ours].")
    tool_timeout_s: float = Field(30.0, gt=0, description="Wall time of one tool call [ours].")
    tool_retries: int = Field(1, ge=0, description="Further attempts after the status infrastructure [ours].")
    tool_concurrency: int = Field(512, ge=1, description="Calls of one tool at once, over all trajectories [ours].")
    tool_rest_after: int = Field(
        20, ge=1, description="Statuses timeout or infrastructure in a row after which a tool rests [ours]."
    )
    tool_rest_s: float = Field(30.0, ge=0, description="How long it rests; calls meanwhile fail at once [ours].")
    tool_limits: dict[str, ToolLimits] = Field(default_factory=dict, description="Per tool; see ToolLimits.")
    max_observation_tokens: int = Field(512, ge=8, description="An observation is cut to this many tokens [ours].")
    observation_cut: Literal["middle", "head", "tail"] = Field(
        "middle", description="What is cut away: the middle, or all behind the head, or all before the tail [ours]."
    )
    format: str = Field("hermes", description="How calls are written: hermes, or the name of one of verl's parsers.")
    thinking: bool = Field(False, description="The chat template opens <think> in the generation prompt.")
    mode: Literal["planner", "end_to_end"] = Field(
        "planner", description="Who writes the answer; end_to_end is for `rltr score` only."
    )


def _default_terms() -> dict[str, dict[str, Any] | None]:
    return {"completeness": {}, "repeat": {}, "error": {}}


class RewardSettings(Settings):
    """Total reward (RLTR Eq. 3)."""

    terms: dict[str, dict[str, Any] | None] = Field(
        default_factory=_default_terms,
        description="Reward terms in order: {name: settings}; 'weight', 'path' (a user's file) and the term's own.",
    )
    format_invalid: float = Field(
        -1.0, allow_inf_nan=False, description="Total of a malformed trajectory; no term runs [paper Eq. 3]."
    )
    floor: float | None = Field(
        -1.0, allow_inf_nan=False, description="A well-formed trajectory never scores below this [ours]."
    )
    truncated: Literal["invalid", "unscored"] = Field(
        "invalid", description="What a trajectory is that ran out of room or turns: malformed, or left out [ours]."
    )
    require_stop_marker: bool = Field(True, description="A trajectory without the stop marker is malformed [ours].")

    @model_validator(mode="after")
    def _has_a_term(self) -> RewardSettings:
        if not self.active_terms:
            raise ValueError("no reward term is left; keep at least one under rltr.reward.terms")
        return self

    @property
    def active_terms(self) -> dict[str, dict[str, Any]]:
        """Terms in order; one set to null by an override is off."""
        return {name: dict(value) for name, value in self.terms.items() if value is not None}


class CacheSettings(Settings):
    """Verdicts on disk, shared by all processes of a node."""

    dir: str | None = Field(None, description="Folder of the cache; null keeps none.")
    mode: Literal["use", "record", "replay"] = Field(
        "use",
        description="use: read, ask on a miss; record: ask always; replay: never ask (a miss is an error).",
    )
    size_gb: float = Field(4.0, gt=0, description="Oldest verdicts go beyond this size [ours].")


class BudgetSettings(Settings):
    """What may be spent. Once it is, the judge leaves trajectories unscored, and the teacher stops."""

    money: float | None = Field(None, ge=0, description="In the currency of the prices; null: no limit.")
    tokens: int | None = Field(None, ge=0, description="Prompt and completion tokens together; null: no limit.")
    price_prompt: float = Field(0.0, ge=0, description="Price of a million prompt tokens.")
    price_completion: float = Field(0.0, ge=0, description="Price of a million completion tokens.")


class _Mendable(ValueError):
    """A setting is refused, and the fix is known."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.fix = fix


def _missing_of_endpoint(node: str, given: EndpointSettings) -> _Mendable:
    """Names what an endpoint lacks, and how it is written."""
    values = {} if given.base_urls else {"base_url": "http://HOST:PORT/v1"}
    values |= {} if given.model else {"model": "NAME"}
    needed = " and ".join(f"{node}.{key}" for key in values)
    overrides = " ".join(f"{node}.{key}={value}" for key, value in values.items())
    changes = " ".join(f"--set {node.removeprefix('rltr.')}.{key}={value}" for key, value in values.items())
    return _Mendable(f"backend=endpoint needs {needed}", f"add {overrides} (to an `rltr` command: {changes}).")


class EndpointSettings(Settings):
    """A model behind OpenAI-compatible chat servers, and how it is asked."""

    base_url: str | list[str] | None = Field(
        None, description="OpenAI-compatible URL ending in /v1, or several that serve the same model."
    )
    model: str | None = Field(None, description="Model name to ask for.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the key.")
    temperature: float = Field(0.7, ge=0, description="Sampling temperature [ours].")
    max_tokens: int = Field(512, ge=1, description="Longest reply, reasoning included [ours].")
    thinking: bool | None = Field(
        None, description="Reasoning on or off (chat_template_kwargs.enable_thinking); null: as the server does."
    )
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further fields of every request.")
    timeout_s: float = Field(60.0, gt=0, description="Deadline of one request [ours].")
    deadline_s: float = Field(300.0, gt=0, description="Deadline of a trajectory's requests, waits included [ours].")
    retries: int = Field(3, ge=0, description="Further attempts after a transport fault, 408, 425, 429 or 5xx.")
    concurrency: int = Field(64, ge=1, description="Requests in flight over all processes of a node [ours].")
    rest_s: float = Field(10.0, ge=0, description="How long a URL that failed is left alone while others work [ours].")
    budget: BudgetSettings = Field(default_factory=BudgetSettings)

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The URLs without a slash at the end."""
        given = [self.base_url] if isinstance(self.base_url, str) else self.base_url or []
        return tuple(dict.fromkeys(url.rstrip("/") for url in given))


class TeacherSettings(EndpointSettings):
    """Who plays the queries of the cold start (RLTR 3.1)."""

    backend: Literal["endpoint", "scripted"] = Field(
        "endpoint", description="A chat endpoint, or a scripted policy of the offline world."
    )
    policy: str = Field("teacher", description="scripted: oracle, lazy, spammer, forger, random or teacher.")
    style: Literal["chat", "completions"] = Field(
        "chat",
        description="chat: messages and tools, the server's template; completions: the rollout's own ids.",
    )
    max_tokens: int = Field(4096, ge=1, description="Longest turn, reasoning included [ours].")
    max_trajectory_tokens: int = Field(
        8192, ge=16, description="Room behind the prompt, observations included; as data.max_response_length [ours]."
    )
    timeout_s: float = Field(300.0, gt=0, description="Deadline of one request [ours].")
    deadline_s: float = Field(1200.0, gt=0, description="Deadline of a trajectory, tools and waits included [ours].")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus of the sampling; null: as the server does.")
    keep_reasoning: bool = Field(
        True, description="chat: earlier thoughts go back to the teacher, as a rollout keeps them in its context."
    )

    @model_validator(mode="after")
    def _complete(self) -> TeacherSettings:
        if self.backend == "endpoint" and (self.base_url or self.model) and not (self.base_urls and self.model):
            raise _missing_of_endpoint("rltr.teacher", self)
        return self


class JudgeSettings(EndpointSettings):
    """The completeness checker (RLTR Eq. 2)."""

    backend: Literal["checklist", "endpoint", "hosted"] = Field(
        "checklist", description="Rows' needs, a chat endpoint, or the model that verl serves itself."
    )
    credit: Literal["all", "fraction"] = Field(
        "all", description="checklist: 1 if every need is met [paper's vote is 0/1], or the share of needs [ours]."
    )
    n_votes: int = Field(3, ge=1, description="N of Eq. 2 [ours]; the checklist always casts one vote.")
    min_votes: int = Field(1, ge=1, description="Readable votes needed, else unscored [ours].")
    early_stop: bool = Field(
        False, description="Ask vote by vote, and stop when the rest cannot change which half the mean is in."
    )
    structured: Literal["auto", "json_schema", "choice", "off"] = Field(
        "auto", description="How a verdict is asked for; auto: json_schema, then choice, then free text."
    )
    verdict_retries: int = Field(1, ge=0, description="Further tries, with another seed, at a readable verdict [ours].")
    context_tokens: int | None = Field(
        None, ge=512, description="Judge's context length; null: what the server says, else no limit."
    )
    max_record_chars: int = Field(
        16_000, ge=1000, description="Observations are cut to keep the record near this many characters [ours]."
    )
    language: Literal["en", "zh"] = Field("en", description="Language of the judge prompt.")
    prompt: str | None = Field(None, description="File with a prompt of your own in place of the shipped one.")
    no_call: Literal["zero", "ask"] = Field(
        "zero", description="A trajectory without any call: 0 without asking [ours], or ask the judge."
    )
    max_unscored_share: float = Field(
        0.5, ge=0, le=1, description="Training stops when a step leaves more than this share unscored [ours]."
    )
    cache: CacheSettings = Field(default_factory=CacheSettings)

    @model_validator(mode="after")
    def _complete(self) -> JudgeSettings:
        if self.backend == "endpoint" and not (self.base_urls and self.model):
            raise _missing_of_endpoint("rltr.judge", self)
        if self.min_votes > self.n_votes:
            raise ValueError(f"min_votes={self.min_votes} exceeds n_votes={self.n_votes}")
        if self.cache.mode != "use" and not self.cache.dir:
            raise ValueError(f"cache.mode={self.cache.mode} needs rltr.judge.cache.dir")
        return self


class EstimatorNeeds(Settings):
    """What one advantage estimator needs besides its name; recipes interpolate from this table."""

    n: int = Field(ge=1, description="Rollouts per query.")
    critic: bool = Field(False, description="Whether a critic is trained.")
    use_kl_loss: bool = Field(False, description="KL to the reference in the actor's loss.")
    use_kl_in_reward: bool = Field(False, description="KL to the reference in the token reward.")


class RltrSettings(Settings):
    """The whole node ``rltr:``."""

    world: str | None = Field(None, description="Folder of an offline world; recipes take paths from it.")
    tools: list[str] = Field(default_factory=list, description="Tool names, files or modules, in the model's order.")
    tool_settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Keyword-only settings per tool."
    )
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    judge: JudgeSettings = Field(default_factory=JudgeSettings)
    teacher: TeacherSettings = Field(default_factory=TeacherSettings)
    dump_dir: str | None = Field(None, description="Folder for one JSON line per scored trajectory.")
    preflight: bool = Field(True, description="Check model, data, tools and disk before Ray starts.")
    estimator: dict[str, EstimatorNeeds] = Field(default_factory=dict, description="See EstimatorNeeds.")


def load_settings(node: Mapping[str, Any] | None) -> RltrSettings:
    """Check a plain (resolved) ``rltr:`` mapping.

    Raises :class:`ConfigError` naming the key path, what is wrong and, for an unknown key, the nearest known one.
    """
    try:
        return RltrSettings.model_validate(dict(node or {}))
    except ValidationError as error:
        raise _explain(error) from None


def from_omegaconf(config: Any) -> RltrSettings:
    """Settings from a Hydra config that has a node ``rltr``."""
    from omegaconf import OmegaConf

    node = config.get("rltr")
    if node is None:
        fix = "start from a recipe (--config-name rltr_planner) or add the node."
        raise ConfigError("the config has no node 'rltr'", where="rltr", fix=fix)
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return load_settings(plain)


def _explain(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join(["rltr", *path])
    if first["type"] == "extra_forbidden":
        known = sorted(_known_keys(path[:-1]))
        close = difflib.get_close_matches(path[-1], known, n=1)
        fix = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}."
        return ConfigError(f"unknown key '{path[-1]}'", where=where, fix=fix)
    message = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], (dict, BaseModel)) else f" (given: {first['input']!r})"
    return ConfigError(f"{message}{given}", where=where, fix=_fix_of(first))


def _fix_of(error: Mapping[str, Any]) -> str:
    context = error.get("ctx") or {}
    if isinstance(context.get("error"), _Mendable):
        return context["error"].fix
    choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
    close = difflib.get_close_matches(str(error["input"]), choices, n=1)
    return f"did you mean '{close[0]}'?" if close else "see docs/settings.md for the meaning and range."


def _known_keys(path: list[str]) -> Iterator[str]:
    model: Any = RltrSettings
    for part in path:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field else EstimatorNeeds
    if isinstance(model, type) and issubclass(model, BaseModel):
        yield from model.model_fields
