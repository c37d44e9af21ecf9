"""Continuous batching: one thread runs the engine; sequences join and leave the batch between tokens."""

import functools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multilin.errors import InputError
from multilin.inference.engine import Engine
from multilin.inference.sampling import RandomNumbers, choose_tokens
from multilin.inference.text import TextCodec, TextStream
from multilin.serving.errors import shutting_down, too_busy
from multilin.serving.jobs import Counts, End, Event, Job, Kept, Piece, Row, make_logprob

PIECE = 64  # tokens of each prompt that are read between two steps of the batch
IDLE_PIECE = 512  # the same, if no sequence runs and no other prompt is read
GROUP = 8  # most prompts that are read at a time
log = logging.getLogger("multilin.serve")


class Scheduler:
    """A thread that runs requests on an engine, several at a time.

    Args:
        engine, codec: the model and its tokenizer.
        notify: called in the scheduler's thread with functions that report events; runs these in another thread.
        num_slots: most sequences that run at a time.
        queue_size: most jobs that wait.
    """

    def __init__(
        self, engine: Engine, codec: TextCodec, notify: Callable[[list[Callable[[], None]]], None],
        num_slots: int, queue_size: int,
    ) -> None:  # fmt: skip
        self.engine, self.codec, self.num_slots, self.queue_size = engine, codec, num_slots, queue_size
        self._notify, self._calls = notify, list[Callable[[], None]]()
        self._changed, self._stopping = threading.Condition(), False
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._reading: deque[Job] = deque()
        self._rows: list[Row] = []
        self._batch = engine.new_state(0)
        self._thread = threading.Thread(target=self._run, name="multilin-engine", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        """The present numbers of jobs and sequences."""
        with self._changed:
            return Counts(sum(map(len, self._waiting.values())), len(self._reading), len(self._rows))

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of these jobs, or none. If no other job waits, more than `queue_size` jobs may be queued.

        Raises:
            ApiError: the queue is full, or the server ends.
        """
        with self._changed:
            if self._stopping:
                raise shutting_down()
            waiting = self.counts.waiting
            if waiting and waiting + len(jobs) > self.queue_size:
                raise too_busy()
            for job in jobs:
                self._waiting.setdefault(job.owner, deque()).append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Drop a job before the next step."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify()

    def finish(self, job: Job) -> None:
        """End a job with the tokens that it has generated; a prompt that is being read is still read to its end."""
        job.max_new_tokens = 0

    def stop(self, seconds: float) -> None:
        """Accept no more jobs, wait at most `seconds` for the present jobs, and end the thread."""
        with self._changed:
            self._stopping = True
            self._deadline = time.monotonic() + seconds
            self._changed.notify()
        self._thread.join(seconds + 10)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._reading or self._rows or self._stopping):
                    self._changed.wait()
                is_idle = not (self._waiting or self._reading or self._rows)
                if self._stopping and (is_idle or time.monotonic() > self._deadline):
                    break
                self._admit()
            try:
                self._drop_cancelled()
                self._read_piece()
                self._step()
            except Exception as error:
                self._reset(self._reading, error)
                self._reading.clear()
            self._send()
        queued = [job for jobs in self._waiting.values() for job in jobs]
        for job in {*(row.job for row in self._rows), *self._reading, *queued}:
            self._tell(job, 0, shutting_down())
        self._send()

    def _admit(self) -> None:
        """Start to read waiting jobs while there are free slots; owners take turns."""
        live = ((owner, deque(job for job in jobs if not job.is_cancelled)) for owner, jobs in self._waiting.items())
        self._waiting = OrderedDict((owner, jobs) for owner, jobs in live if jobs)
        num_free = self.num_slots - len(self._rows) - sum(len(job.settings) for job in self._reading)
        while self._waiting:
            owner, jobs = next(iter(self._waiting.items()))
            num_free -= len(jobs[0].settings)
            if num_free < 0:
                break
            self._reading.append(jobs.popleft())
            self._waiting.move_to_end(owner)
            if not jobs:
                del self._waiting[owner]

    def _drop_cancelled(self) -> None:
        self._reading = deque(job for job in self._reading if not job.is_cancelled)
        for place in reversed(range(len(self._rows))):
            if self._rows[place].job.is_cancelled:
                self._leave(place)

    def _leave(self, place: int) -> Any:
        """Take a row out of the batch and return its state; as in the engine, the last row moves to the free place."""
        last = self._rows.pop()
        if place < len(self._rows):
            self._rows[place] = last
        return self._batch.leave(place)

    def _read_piece(self) -> None:
        """Read the next tokens of some prompts, and begin the sequences of prompts that are completely read."""
        jobs = self._next_prompts()
        if not jobs:
            return
        size = IDLE_PIECE if len(jobs) == 1 and not self._rows else PIECE
        ids = [job.token_ids[job.position :][: 1 if job.prompt_logprobs else size] for job in jobs]
        try:
            state = self._joined(jobs)
            logits_BV = self.engine.read(state, ids)
            for place in reversed(range(1, len(jobs))):
                jobs[place].state = state.leave(place)
            jobs[0].state = state
        except Exception as error:
            self._fail(jobs, error)
            return
        ready = []
        for job, read, logits_V in zip(jobs, ids, logits_BV, strict=True):
            job.position += len(read)
            if job.position < len(job.token_ids) and not job.prompt_logprobs:
                self._reading.append(job)
            else:
                ready.append((job, logits_V))
        for number, (job, logits_V) in enumerate(ready):
            try:
                self._begin(job, logits_V)
            except Exception as error:  # the batch may be half changed
                self._reset([later for later, _ in ready[number:]], error)
                return

    def _next_prompts(self) -> list[Job]:
        """Choose jobs whose prompts are read together: either all begin a text, or all continue a state."""
        jobs = [job for job in self._reading if job.is_new == self._reading[0].is_new][:GROUP]
        self._reading = deque(job for job in self._reading if job not in jobs)
        return jobs

    def _joined(self, jobs: list[Job]) -> Any:
        """Join the states of the jobs to one state, with a row per job."""
        if jobs[0].is_new:
            return self.engine.new_state(len(jobs))
        for job in jobs:
            if job.start is not None:
                job.state, job.start = self.engine.restore(job.start), None
        for job in jobs[1:]:
            jobs[0].state.join(job.state)
        return jobs[0].state

    def _begin(self, job: Job, logits_V: NDArray[np.float32]) -> None:
        """Add the sequences of a job to the batch after its prompt was read."""
        num_rows, first = len(job.settings), len(self._rows)
        self._batch.join(job.state if num_rows == 1 else job.state.select([0] * num_rows))
        job.state = None
        for index, settings in enumerate(job.settings):
            stream = TextStream(self.codec, job.known_ids, settings.stop_at_end, settings.stop)
            forced, seen = deque(job.token_ids[job.position :]), dict.fromkeys(job.known_ids, 0)
            self._rows.append(Row(job, index, settings, RandomNumbers(settings.seed), stream, seen, forced))
        self._advance(first, np.repeat(logits_V[None], num_rows, axis=0))

    def _step(self) -> None:
        """Read the next token of each row, and choose the token after it."""
        if not self._rows:
            return
        try:
            logits_BV = self.engine.read(self._batch, [[row.next_id] for row in self._rows])
        except Exception as error:
            self._reset([], error)
            return
        self._advance(0, logits_BV)

    def _reset(self, jobs: Iterable[Job], error: Exception) -> None:
        """Fail these jobs and all jobs of the batch, and continue with an empty batch."""
        self._fail(list(dict.fromkeys([*(row.job for row in self._rows), *jobs])), error)
        self._rows, self._batch = [], self.engine.new_state(0)

    def _advance(self, first: int, logits_BV: NDArray[np.float32]) -> None:
        """Choose the next tokens of all rows from place `first` on, and remove the rows that have ended."""
        self.codec.exclude_padding(logits_BV)
        chosen = []
        for place, row in enumerate(self._rows[first:]):
            if row.forced:
                row.next_id = row.forced.popleft()
                if len(row.forced) < row.job.prompt_logprobs:  # others: unread by the last turn
                    entry = make_logprob(logits_BV[place], row.next_id, row.job.num_logprobs or 0)
                    self._tell(row.job, row.index, Piece("", [(entry, -1)]))
            elif len(row.token_ids) == row.job.max_new_tokens:  # no further token is wanted
                row.end = "length"
            else:
                chosen.append(place)
        rows = [self._rows[first + place] for place in chosen]
        has_logprobs = [row.job.num_logprobs is not None for row in rows]
        before = {place: logits_BV[place].copy() for place, has in zip(chosen, has_logprobs, strict=True) if has}
        tokens = choose_tokens(
            logits_BV if len(chosen) == len(logits_BV) else logits_BV[chosen], [row.settings for row in rows],
            [row.seen for row in rows], [row.numbers for row in rows],
        )  # fmt: skip
        for place, token in zip(chosen, tokens, strict=True):
            self._accept(first + place, token, before.get(place))
        self._take_out(first)

    def _accept(self, place: int, token: int, logits_V: NDArray[np.float32] | None) -> None:
        """Add a new token to a row, and report text that is now complete."""
        row, job = self._rows[place], self._rows[place].job
        row.next_id = token
        row.seen[token] = row.seen.get(token, 0) + 1
        row.token_ids.append(token)
        stream, num_before, was_whole = row.stream, row.stream.length, row.stream.is_whole
        is_end = row.settings.stop_at_end and (self.codec.is_end(token) or token in job.ends)
        piece = "" if is_end else stream.put(token)
        if logits_V is not None:
            begin = num_before if is_end else stream.begin(token, num_before)
            row.pending.append((make_logprob(logits_V, token, job.num_logprobs or 0), begin))
        if is_end:
            row.end = "stop"
            return
        if was_whole:
            row.kept = None
            if stream.is_stopped or not stream.is_whole:
                row.kept = Kept(self._batch.select([place]), len(row.token_ids) - 1, num_before)
        if stream.is_stopped:
            row.end = "stop"
        elif len(row.token_ids) >= job.max_new_tokens:
            row.end = "length"
        self._release(row, piece)

    def _release(self, row: Row, piece: str) -> None:
        """Report new text and the tokens that begin in reported text. When a row ends, report all other tokens too."""
        length = len(row.stream.text)
        is_whole = row.stream.is_whole or row.end is not None
        num_ready = next((i for i, (_, begin) in enumerate(row.pending) if begin >= length and not is_whole), None)
        tokens, row.pending = row.pending[:num_ready], [] if num_ready is None else row.pending[num_ready:]
        if row.stream.is_stopped:  # tokens of a stop string are placed at the end of the text
            tokens = [(entry, min(begin, length)) for entry, begin in tokens]
        if piece or tokens:
            self._tell(row.job, row.index, Piece(piece, tokens))

    def _take_out(self, first: int) -> None:
        """Remove from the batch the rows from place `first` on that have ended."""
        for place in reversed(range(first, len(self._rows))):
            row = self._rows[place]
            if row.end is None:
                continue
            state, stream, token_ids = self._leave(place), row.stream, row.token_ids
            if not stream.is_stopped:
                self._release(row, stream.end())
            num_generated, num_unread = len(token_ids), int(row.end == "length" and bool(token_ids))
            if stream.is_stopped:
                assert row.kept is not None
                rest = self.codec.encode_more(stream.text[row.kept.num_characters :])
                state, token_ids, num_unread = row.kept.state, [*token_ids[: row.kept.num_tokens], *rest], len(rest)
            elif row.end == "stop":
                token_ids = token_ids[:-1]
            elif row.kept is not None:
                state, num_unread = row.kept.state, num_generated - row.kept.num_tokens
            self._tell(row.job, row.index, End(row.end, num_generated, token_ids, state, num_unread))

    def _tell(self, job: Job, index: int, event: Event) -> None:
        self._calls.append(functools.partial(job.listen, index, event))

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        if not isinstance(error, InputError):
            log.exception("the engine failed")
        for job in jobs:
            self._tell(job, 0, error)

    def _send(self) -> None:
        if self._calls:
            calls, self._calls = self._calls, []
            self._notify(calls)
