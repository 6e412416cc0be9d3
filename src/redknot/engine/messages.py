"""What the server process and the engine process say to each other: MessagePack, one schema."""

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all that crosses the socket; the tag names the class."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of messages."""


# --- towards the engine


class SpanHint(Record, frozen=True, kw_only=True):
    """Tokens ``start`` to ``stop`` of a prompt that may be reused wherever they stand."""

    start: int
    stop: int
    title: str = ""


class Grammar(Record, frozen=True, kw_only=True):
    """What an answer must look like."""

    kind: Literal["json_object", "json_schema"]
    schema: str = ""
    "JSON text of the schema."


class SamplingSpec(Record, frozen=True, kw_only=True):
    """How tokens are chosen and when a choice ends; the neutral values are greedy and unlimited."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    "Of the first choice; the others count up."
    n: int = 1
    logprobs: int | None = None
    "How many alternatives are told with each token; None tells no log-probabilities at all."
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


class Submit(Message, frozen=True, kw_only=True):
    """A request. Ids are of the server's making and are never used twice."""

    request_id: str
    token_ids: list[int]
    spans: tuple[SpanHint, ...] = ()
    "Sorted, without overlap."
    probe: tuple[int, int]
    "(start, stop) of the last user text."
    sampling: SamplingSpec
    policy: str | None = None
    "As the policy parser reads it; None is the server's own."
    exact: bool = False
    "Bit-equal to an engine without reuse."
    salt: str = ""
    "Tenant; set by the server, never by a client."
    arrived: float
    "Unix time."


class Cancel(Message, frozen=True, kw_only=True):
    """Stop a request, or one choice of it, wherever it stands."""

    request_id: str
    choice: int | None = None
    reason: Literal["cancelled", "stop"] = "cancelled"
    "What it ends as: a stop string, which only the server sees, makes an answer whole."


class SegmentAdd(Message, frozen=True, kw_only=True):
    """Build and keep the state of a segment."""

    request_id: str
    salt: str = ""
    token_ids: list[int]
    title: str = ""


class SegmentQuery(Message, frozen=True, kw_only=True):
    """List segments of a tenant, or only those with these keys."""

    request_id: str
    salt: str = ""
    keys: tuple[str, ...] | None = None


class SegmentDelete(Message, frozen=True, kw_only=True):
    """Forget a segment."""

    request_id: str
    salt: str = ""
    key: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Take nothing new, finish what runs for at most so many seconds, then end."""

    drain_seconds: float = 30.0


# --- towards the server


class GateReport(Record, frozen=True, kw_only=True):
    """What the gate found for this model, map and policy."""

    passed: bool
    summary: str
    "One line with the figures."
    cached: bool = False
    "Read from an earlier run of the same weights, map, policy and data."


class Ready(Message, frozen=True, kw_only=True):
    """The engine takes requests."""

    model: str
    context_length: int
    max_requests: int
    num_pages: int
    page_bytes: int
    pool_tokens: int
    "Of prompt and answers, for which all pages together have room."
    policy: str
    "The default policy."
    head_map: str
    "Digest of the head map; empty without one."
    end_token_ids: tuple[int, ...]
    "Tokens that end an answer unless a request ignores them."
    gate: GateReport | None = None


class Failed(Message, frozen=True, kw_only=True):
    """The engine cannot start; one line says why."""

    message: str


class Refused(Message, frozen=True, kw_only=True):
    """A request was not taken, or something asked about segments has no answer."""

    request_id: str
    status: Literal[400, 404, 429, 500, 503]
    code: str
    message: str
    param: str | None = None


class SegmentReport(Record, frozen=True, kw_only=True):
    """What became of one span of a prompt."""

    start: int
    stop: int
    title: str = ""
    hit: Literal["exact", "derived", "device", "host", "disk", "none"]
    "The tier its state came from."
    reason: str = ""
    "Why there was no hit."
    recomputed: int
    "Tokens of it that some layer computed."
    key: str = ""
    "Of its stored state, where it has or may get one."


class Report(Record, frozen=True, kw_only=True):
    """What was done about one prompt."""

    policy: str
    "What ran."
    decision: str
    "Why it ran."
    prompt_tokens: int
    cached_tokens: int
    "Floor of the sum over tokens of the share of layers not computed."
    recomputed_tokens: int
    "Tokens that ran through at least one layer."
    flops_share: float
    "Of dense's for the same prompt."
    segments: tuple[SegmentReport, ...] = ()
    seconds: dict[str, float] = {}
    "By stage; `queue` from arrival to the first work, `wait` the turns of others in between."


class Prefilled(Record, frozen=True, kw_only=True):
    """A prompt is in place; the first token comes with it or next."""

    request_id: str
    report: Report


class TokenInfo(msgspec.Struct, frozen=True, array_like=True):
    """A new token."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    "The likeliest tokens and their log-probabilities."


class Produced(Record, frozen=True, kw_only=True):
    """New tokens of one choice, in order; an end token is the last, if one ended it."""

    request_id: str
    choice: int = 0
    tokens: tuple[TokenInfo, ...]


class Ended(Record, frozen=True, kw_only=True):
    """A choice is complete."""

    request_id: str
    choice: int = 0
    reason: Literal["stop", "length", "cancelled", "error"]
    stop_token: int | None = None
    "The end token, which is no text."
    message: str = ""
    "What went wrong, in one line."


class Output(Message, frozen=True, kw_only=True):
    """What one step gave."""

    prefilled: tuple[Prefilled, ...] = ()
    produced: tuple[Produced, ...] = ()
    ended: tuple[Ended, ...] = ()


class SegmentInfo(Record, frozen=True, kw_only=True):
    """A stored segment."""

    key: str
    num_tokens: int
    num_bytes: int
    state: Literal["ready", "building", "absent"]
    tier: Literal["device", "host", "disk", "none"] = "none"


class Segments(Message, frozen=True, kw_only=True):
    """The answer to everything asked about segments."""

    request_id: str
    segments: tuple[SegmentInfo, ...] = ()


class PoolUse(Record, frozen=True, kw_only=True):
    """Pages of the pool."""

    total: int
    free: int
    requests: int
    "Held by running requests."
    prefixes: int
    "Kept for prompts that begin alike; given back when others need them."
    by_class: dict[str, int] = {}
    "Pages that running requests hold, by head class."


class Heartbeat(Message, frozen=True, kw_only=True):
    """How the engine is; sent twice a second at least, also in the middle of long work."""

    time: float
    waiting: int = 0
    running: int = 0
    "Prefilling or decoding."
    pool: PoolUse | None = None
    fallback: str = ""
    "Why the engine answers dense only; empty while it does not."
    agreement: float | None = None
    "Of the last shadow runs."
    counters: dict[str, float] = {}
    "Since the start; names as in `redknot.engine.counters`."


ToEngine = Submit | Cancel | SegmentAdd | SegmentQuery | SegmentDelete | Shutdown
FromEngine = Ready | Failed | Refused | Output | Segments | Heartbeat
