"""Token generation with continuous batching for any Hugging Face causal LM, on any device.

Requests join and leave between forward passes. One pass takes the next token of every running sequence and the
prompts (or pieces of them) of new ones, packed without padding. See ``kv_cache`` for where keys and values live,
``sampling`` for how a token is drawn and ``stopping`` for stop strings.

Exactness is checked, not assumed: a new engine compares its log-probabilities with a plain forward pass of the same
model, and refuses a model whose attention it does not reproduce.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rltr_verl.errors import ConfigError, ModelError, RolloutError
from rltr_verl.rollout.kv_cache import (
    ATTENTION_NAME,
    BLOCK,
    Chunk,
    PrefixIndex,
    PrefixOwner,
    PrefixStore,
    SlotCache,
    StepPlan,
    StoredPrefix,
    block_hashes,
)
from rltr_verl.rollout.lean_decoder import LeanDecoder
from rltr_verl.rollout.sampling import SamplingParams, sample
from rltr_verl.rollout.stopping import StopMatcher

FinishReason = Literal["stop", "length", "abort"]

# A request waits one pass for another one's prompt if that spares it this many tokens and half of its own prefill.
_WORTH_WAITING = 2 * BLOCK
_ROW_STEP, _LENGTH_STEP = 16, 64


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of an engine.

    max_model_len: prompt and output of one request, in tokens. max_num_seqs: sequences running at once.
    max_batched_tokens: new tokens of one forward pass; longer prompts are computed in pieces.
    kv_cache_bytes: keys and values of running sequences. prefix_cache_bytes: of finished ones (0 turns reuse off).
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    kv_cache_bytes: int = 4 << 30
    prefix_cache_bytes: int = 1 << 30


@dataclass(frozen=True)
class Completion:
    """What became of a request.

    token_ids: every sampled id, the stop token and the tokens of a stop string included. log_probs: one per id, under
    softmax(logits / temperature) of the full vocabulary. first_version, last_version: the weights that drew the first
    and the last token. n_reused: prompt tokens whose keys and values were already there.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    n_reused: int
    first_version: int | None
    last_version: int | None
    stop_string: str | None = None


@dataclass(eq=False)
class _Sequence:
    request_id: str
    tokens: list[int]  # prompt and output
    n_prompt: int
    max_length: int
    params: SamplingParams
    on_done: Callable[[Completion], None]
    draw: random.Random
    stop_ids: frozenset[int]
    stop_candidates: frozenset[int]
    hashes: list[int]
    n_cached: int = 0  # leading tokens whose keys and values are in the row
    row: int = -1
    n_reused: int = 0
    source: StoredPrefix | None = None
    log_probs: list[float] = field(default_factory=list)
    first_version: int | None = None
    last_version: int | None = None

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_cached

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]


class Engine:
    """Runs requests through one model. Single-threaded: every method is called from the same thread.

    Args:
        model: a Hugging Face causal LM; the engine sets its attention implementation and runs it under inference mode.
        tokenizer: needed for stop strings only.
        limits: bounds on memory and batch.
        eos_token_ids: tokens that end a sequence unless the request says ``ignore_eos``.
        seed: with the request id it gives the seed of a request that names none.
        lean: use ``LeanDecoder`` where it fits the model.

    Raises:
        ModelError: the model does not attend through transformers' attention interface, or the engine's
            log-probabilities differ from those of the model itself.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        limits: EngineLimits,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        lean: bool = True,
    ) -> None:
        self.model = model.eval()
        self._dtype: torch.dtype = model.dtype  # once: the model looks through its parameters for it
        self._lean = LeanDecoder.of(model) if lean else None
        self.limits = limits
        self.version: int | None = None
        self.n_tokens_sampled = 0
        self.n_tokens_computed = 0
        self._seed = seed
        self._eos = frozenset(eos_token_ids)
        self._matcher = StopMatcher(tokenizer)
        config = model.config.get_text_config()
        self._n_vocab = min(len(tokenizer), config.vocab_size) if tokenizer is not None else config.vocab_size
        self._cache = SlotCache(config.num_hidden_layers)
        self._index = PrefixIndex()
        self._store = PrefixStore(self._index, limits.prefix_cache_bytes)
        self._waiting: deque[_Sequence] = deque()
        self._active: list[_Sequence] = []  # the index of a sequence is its row
        self._updated: set[str] = set()
        self._targets: dict[str, torch.Tensor] = {}
        self._verify()

    # ---- requests -------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        on_done: Callable[[Completion], None],
    ) -> None:
        """Queue a request; ``on_done`` is called once, from ``step`` or ``abort``.

        Raises ConfigError if the prompt is empty, leaves no room to generate or holds an id the model does not have,
        or if the request could outgrow the key-value cache.
        """
        self._check_prompt(prompt)
        tokens = list(prompt)
        max_length = min(len(tokens) + params.max_tokens, self.limits.max_model_len)
        self._check_room(max_length)
        self._waiting.append(
            _Sequence(
                request_id=request_id,
                tokens=tokens,
                n_prompt=len(tokens),
                max_length=max_length,
                params=params,
                on_done=on_done,
                draw=random.Random(self._request_seed(request_id, params, len(tokens))),
                stop_ids=params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos,
                stop_candidates=self._matcher.candidates(params.stop),
                hashes=block_hashes(tokens) if self.limits.prefix_cache_bytes else [],
            )
        )

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        limit, n_ids = self.limits.max_model_len, self.model.config.get_text_config().vocab_size
        if not 0 < len(prompt) < limit:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens does not leave room to generate within {limit}",
                where="rollout.max_model_len",
                fix="raise rollout.max_model_len (prompt_length + response_length) or shorten the prompt",
            )
        if min(prompt) < 0 or max(prompt) >= n_ids:
            raise ConfigError(
                f"the prompt holds token ids outside 0..{n_ids - 1}", fix="use the tokenizer of this model folder"
            )

    def _check_room(self, length: int) -> None:
        needed = _round_up(length, _LENGTH_STEP) * self._cache.bytes_per_token
        if needed > self.limits.kv_cache_bytes:
            raise ConfigError(
                f"one request of up to {length} tokens needs {needed / 2**20:.1f} MiB of key-value cache, "
                f"the limit is {self.limits.kv_cache_bytes / 2**20:.1f} MiB",
                where="rollout.engine_kwargs.transformers.kv_cache_mb",
                fix="raise it, or lower rollout.response_length",
            )

    def _request_seed(self, request_id: str, params: SamplingParams, n_prompt: int) -> int:
        # The length tells the turns of one trajectory apart when they share a request id.
        name = f"seed:{params.seed}" if params.seed is not None else f"{self._seed}:{request_id}:{n_prompt}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._waiting)

    @property
    def request_ids(self) -> list[str]:
        """Of all unfinished requests."""
        return [sequence.request_id for sequence in (*self._active, *self._waiting)]

    def abort(self, request_id: str) -> bool:
        """End a request; it completes with what it has. False if there is no such request."""
        for sequence in [*self._active, *self._waiting]:
            if sequence.request_id == request_id:
                self._finish(sequence, "abort")
                return True
        return False

    def abort_all(self) -> list[str]:
        """End every request; returns their ids."""
        ids = self.request_ids
        for sequence in [*self._active, *self._waiting]:
            self._finish(sequence, "abort")
        return ids

    # ---- one forward pass -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> int:
        """Admit what fits, run the model once, draw a token for every sequence that is up to date.

        Returns the number of tokens drawn. Raises RolloutError if the logits are not numbers.
        """
        self._admit()
        decode = [s for s in self._active if s.n_pending == 1]
        chunks = self._chunks(len(decode))
        if not decode and not chunks:
            return 0
        logits = self._forward(decode, chunks)
        for sequence in decode:
            sequence.n_cached += 1
        for sequence, chunk in chunks:
            sequence.n_cached += chunk.n_tokens
            self._offer_prompt(sequence)
        ready = decode + [sequence for sequence, _ in chunks if sequence.n_pending == 0]
        if ready:
            self._extend(ready, logits)
        return len(ready)

    def _chunks(self, n_decode: int) -> list[tuple[_Sequence, Chunk]]:
        """The pieces of prompts that this pass computes, in the order of rows, within the budget of tokens."""
        chunks, offset = [], n_decode
        for sequence in self._active:
            count = min(sequence.n_pending, self.limits.max_batched_tokens - offset)
            if sequence.n_pending > 1 and count > 0:
                chunks.append((sequence, Chunk(sequence.row, sequence.n_cached, count, offset)))
                offset += count
        return chunks

    def _forward(self, decode: list[_Sequence], chunks: list[tuple[_Sequence, Chunk]]) -> torch.Tensor:
        """Run the model on the packed step; returns logits [sequences that are now up to date, vocabulary]."""
        tokens = [s.tokens[s.n_cached] for s in decode]
        positions = [s.n_cached for s in decode]
        rows = [s.row for s in decode]
        last = list(range(len(decode)))
        for sequence, chunk in chunks:
            end = chunk.start + chunk.n_tokens
            tokens += sequence.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            rows += [chunk.row] * chunk.n_tokens
            if end == len(sequence.tokens):
                last.append(chunk.offset + chunk.n_tokens - 1)
        self._reserve(max(positions) + 1)
        device = self.model.device
        packed = torch.tensor([tokens, positions, rows]).to(device, non_blocking=True)
        self._cache.plan = StepPlan(
            rows=packed[2],
            positions=packed[1],
            decode_rows=rows[: len(decode)],
            chunks=[chunk for _, chunk in chunks],
            dtype=self._dtype,
            decode_length=max(positions[: len(decode)], default=0) + 1,
        )
        self.n_tokens_computed += len(tokens)
        keep = torch.tensor(last or [len(tokens) - 1], device=device)
        if self._lean is not None:
            return self._lean(packed[0], packed[1], self._cache, keep)
        out = self.model(
            input_ids=packed[0].unsqueeze(0),
            position_ids=packed[1].unsqueeze(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return out.logits[0]

    def _reserve(self, length: int) -> None:
        n_rows, longest = self._room(self._active)
        if length > self._cache.length:
            # Doubling keeps the number of copies small; no row ever needs more than `longest`.
            length = min(max(_round_up(length, _LENGTH_STEP), 2 * self._cache.length), longest)
        spare_rows = min(_round_up(n_rows, _ROW_STEP), self.limits.max_num_seqs)
        if spare_rows * max(length, self._cache.length) * self._cache.bytes_per_token <= self.limits.kv_cache_bytes:
            n_rows = spare_rows
        self._cache.reserve(n_rows, length, self.limits.kv_cache_bytes)

    def _room(self, sequences: Sequence[_Sequence]) -> tuple[int, int]:
        """Rows and tokens a row that these sequences may come to need."""
        return len(sequences), _round_up(max((s.max_length for s in sequences), default=0), _LENGTH_STEP)

    def _extend(self, ready: list[_Sequence], logits: torch.Tensor) -> None:
        """Draw the next token of each sequence and finish those that end with it."""
        uniforms = [sequence.draw.getrandbits(48) / (1 << 48) for sequence in ready]
        tokens, log_probs = sample(logits, [s.params for s in ready], uniforms, self._n_vocab)
        ended: list[tuple[_Sequence, FinishReason, str | None]] = []
        for sequence, token, log_prob in zip(ready, tokens, log_probs, strict=True):
            if log_prob != log_prob:
                raise RolloutError(
                    "the model's logits are not numbers", where=f"request {sequence.request_id}", fix="lower the lr"
                )
            sequence.tokens.append(token)
            sequence.log_probs.append(log_prob)
            sequence.last_version = self.version
            if len(sequence.log_probs) == 1:
                sequence.first_version = self.version
            end = self._end_of(sequence, token)
            if end is not None:
                ended.append((sequence, *end))
        self.n_tokens_sampled += len(ready)
        for sequence, reason, stop_string in ended:
            self._finish(sequence, reason, stop_string)

    def _end_of(self, sequence: _Sequence, token: int) -> tuple[FinishReason, str | None] | None:
        if token in sequence.stop_ids:
            return "stop", None
        if token in sequence.stop_candidates:
            found = self._matcher.completed(sequence.output, sequence.params.stop)
            if found is not None:
                return "stop", found
        return ("length", None) if len(sequence.tokens) >= sequence.max_length else None

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give rows to waiting requests, in order of arrival, as far as rows, memory and the pass's budget go."""
        if not self._waiting:
            return
        budget = self.limits.max_batched_tokens - sum(s.n_pending for s in self._active)
        coming = {block for s in self._active if s.n_pending > 1 for block in s.hashes}
        held: list[_Sequence] = []
        while self._waiting and budget > 0 and len(self._active) < self.limits.max_num_seqs:
            sequence = self._waiting.popleft()
            owner, n_shared = self._index.find(sequence.tokens, sequence.hashes, len(sequence.tokens) - 1)
            if self._better_later(sequence, n_shared, coming):
                held.append(sequence)
                continue
            if not self._fits(sequence):
                held.append(sequence)
                break
            self._place(sequence, owner, n_shared)
            budget -= sequence.n_pending
            coming.update(sequence.hashes)
        self._waiting.extendleft(reversed(held))

    @staticmethod
    def _better_later(sequence: _Sequence, n_shared: int, coming: set[int]) -> bool:
        """Whether a prompt that is being computed right now will spare this one more than the pass it must wait."""
        n_coming = BLOCK * sum(block in coming for block in sequence.hashes)
        spared = min(n_coming, len(sequence.tokens) - 1) - n_shared
        return spared >= _WORTH_WAITING and 2 * spared >= len(sequence.tokens) - n_shared

    def _fits(self, sequence: _Sequence) -> bool:
        n_rows, length = self._room([*self._active, sequence])
        return n_rows * length * self._cache.bytes_per_token <= self.limits.kv_cache_bytes

    def _place(self, sequence: _Sequence, owner: PrefixOwner | None, n_shared: int) -> None:
        sequence.row = len(self._active)
        self._active.append(sequence)
        if owner is None:
            return
        self._reserve(n_shared)
        if isinstance(owner, StoredPrefix):
            self._store.touch(owner)
            self._cache.import_row(sequence.row, n_shared, owner.tensors)
            sequence.source = owner
        else:
            assert isinstance(owner, _Sequence)
            self._cache.copy_row(owner.row, sequence.row, n_shared)
        sequence.n_cached = sequence.n_reused = n_shared

    def _offer_prompt(self, sequence: _Sequence) -> None:
        """Let others copy a prompt as soon as it is computed."""
        if sequence.hashes and sequence.n_pending == 0:
            self._index.add(sequence)

    def _finish(self, sequence: _Sequence, reason: FinishReason, stop_string: str | None = None) -> None:
        if sequence.row < 0:
            self._waiting.remove(sequence)
        else:
            self._keep(sequence)
            self._vacate(sequence)
        versions = (sequence.first_version, sequence.last_version) if sequence.log_probs else (self.version,) * 2
        sequence.on_done(
            Completion(
                token_ids=sequence.output,
                log_probs=sequence.log_probs,
                finish_reason=reason,
                n_reused=sequence.n_reused,
                first_version=versions[0],
                last_version=versions[1],
                stop_string=stop_string,
            )
        )

    @torch.inference_mode()
    def _keep(self, sequence: _Sequence) -> None:
        """Store the row for the trajectory's next turn, in place of the turn before that it extends."""
        self._index.remove(sequence)
        if sequence.n_cached < BLOCK or not self.limits.prefix_cache_bytes:
            return
        tokens = sequence.tokens[: sequence.n_cached]
        if sequence.source is not None and sequence.source.tokens == tokens[: sequence.source.n_cached]:
            self._store.drop(sequence.source)
        tensors = self._cache.export_row(sequence.row, len(tokens))
        self._store.put(StoredPrefix(tokens, block_hashes(tokens), tensors))

    @torch.inference_mode()
    def _vacate(self, sequence: _Sequence) -> None:
        """Move the last row into the one that falls free, so that rows stay without gaps."""
        last = self._active.pop()
        if last is not sequence:
            self._cache.copy_row(last.row, sequence.row, last.n_cached)
            self._active[sequence.row] = last
            last.row = sequence.row
        sequence.row = -1

    # ---- memory and weights ---------------------------------------------------------------------------------------

    def clear_prefix_cache(self) -> None:
        """Forget finished sequences."""
        self._store.clear()

    def release_kv_cache(self) -> None:
        """Give back all memory of keys and values; running sequences compute theirs again when stepped."""
        self._forget_computed()
        self._cache.release()

    def _forget_computed(self) -> None:
        self._store.clear()
        self._index.clear()
        for sequence in self._active:
            sequence.n_cached = 0
            sequence.source = None

    @property
    def cache_nbytes(self) -> int:
        """Bytes of keys and values now held, of running and of finished sequences."""
        return self._cache.nbytes + self._store.nbytes

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors over the model's own, by name; an update may come in several calls.

        Raises RolloutError for a name the model does not have or a shape that differs.
        """
        if not self._targets:
            self._targets = self.model.state_dict()
        for name, tensor in weights:
            target = self._targets.get(name)
            if target is None or target.shape != tensor.shape:
                found = "it has none" if target is None else f"its own is {tuple(target.shape)}"
                raise RolloutError(
                    f"weight {name!r} of shape {tuple(tensor.shape)} does not fit the rollout's model ({found})",
                    where="update_weights",
                    fix="train and roll out the same model folder; merge LoRA adapters with model.lora.merge=True",
                )
            target.copy_(tensor)
            self._updated.add(name)

    def finish_weights(self, version: int | None) -> None:
        """End an update: check that it was complete, forget all keys and values, and name the new version.

        Running sequences compute their keys and values again, so that every later log-probability is the new model's.
        Raises RolloutError if a weight did not come (tied weights count once).
        """
        covered = {self._targets[name].data_ptr() for name in self._updated}
        missing = sorted(name for name, target in self._targets.items() if target.data_ptr() not in covered)
        self._updated, self._targets = set(), {}
        if missing:
            raise RolloutError(
                f"{len(missing)} weights did not come, first {missing[:3]}",
                where="update_weights",
                fix="send every parameter and persistent buffer of the model in each update",
            )
        self._forget_computed()
        if version is not None:
            self.version = version

    # ---- exactness ------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Generate a few tokens in pieces and compare their log-probabilities with a plain forward pass."""
        n_prompt = min(40, self.limits.max_model_len - 4)
        prompt = [(7 * i + 3) % self._n_vocab for i in range(n_prompt)]
        reference = _plain_log_probs(self.model)
        self.model.set_attn_implementation(ATTENTION_NAME)
        if self.model.config._attn_implementation != ATTENTION_NAME:
            raise _unsupported(self.model, "its attention cannot be exchanged")
        limits, self.limits = self.limits, EngineLimits(self.limits.max_model_len, 4, 16, self.limits.kv_cache_bytes, 0)
        done: list[Completion] = []
        self.add("verify", prompt, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), done.append)
        try:
            while not done:
                self.step()
        except (AttributeError, TypeError, IndexError, KeyError, ValueError) as error:
            raise _unsupported(
                self.model, f"it does not run on a packed batch ({type(error).__name__}: {error})"
            ) from error
        finally:
            self.limits = limits
            self._cache.release()
        expected = reference(prompt, done[0].token_ids)
        worst = max(abs(a - b) for a, b in zip(expected, done[0].log_probs, strict=True))
        if not worst <= (1e-3 if self._dtype == torch.float32 else 0.3):
            raise _unsupported(self.model, f"log-probabilities differ by {worst:.3g} from its own forward pass")


def _plain_log_probs(model: Any) -> Callable[[list[int], list[int]], list[float]]:
    """A function (prompt, output) -> log-probabilities by the model's plain forward pass with its own attention."""
    own = model.config._attn_implementation
    own = "eager" if own in (None, ATTENTION_NAME) else own

    @torch.inference_mode()
    def log_probs(prompt: list[int], output: list[int]) -> list[float]:
        model.set_attn_implementation(own)
        ids = torch.tensor([prompt + output], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        model.set_attn_implementation(ATTENTION_NAME)
        return torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()

    return log_probs


def _unsupported(model: Any, why: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be served by the transformers rollout: {why}",
        where="actor_rollout_ref.rollout.name",
        fix="use rollout.name=vllm or sglang for this model",
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
