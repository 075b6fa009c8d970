"""The networks of the levels in memory: all of them, or two at most, the one in use and the next one.

A level's network on a backend is a copy of its weights, packed as the backend likes them, even where the networks themselves are
views of one tensor. Within an epoch the levels come in order (core/sampler.py), so the next one is known and can be built by a
thread while the current one is in use (PieBridge, asynchronous loading): peak memory is then that of the original alone plus one
network, whatever the number of levels.
"""

import concurrent.futures
import contextlib
import logging
import threading

LOG = logging.getLogger(__name__)
THREAD_NAME = "next level"


class Resident:
    """All levels stay in memory."""

    def open(self, build):
        """The segment that `build()` gives."""
        return build()

    @contextlib.contextmanager
    def visiting(self, segments):
        """Within it, levels are used in the order of their segments; None for one that has no segment."""
        yield

    def load(self, segment):
        """See to it that a segment of `open` is ready to be called."""


class DoubleBuffer:
    """At most two levels are in memory; what is asked for again later is built again, bit for bit the same.

    is_threaded: whether a thread may build the next one. It may not where building runs operations of torch: a second thread that
    runs one parallel operation gets OpenMP workers of its own, and slows every later operation of the first (see doc/LOG.md).
    """

    def __init__(self, is_threaded=True):
        self._is_threaded = is_threaded
        self._lock = threading.RLock()  # preparation builds one level aside while another is in use
        self._alive = {}  # {OnDemand: Future of its segment}, two at most
        self._current, self._ahead, self._executor = None, [], None  # ahead: what will be used, in order; empty outside of `visiting`

    def open(self, build):
        """A stand-in, called like the segment that `build()` gives, which is built at once, since it may fail, and dropped after use."""
        segment = OnDemand(self, build)
        with self._lock:
            if len(self._alive) > 1:
                self._drop([next(each for each in self._alive if each is not self._current)])
            self._build(segment)
        return segment

    @contextlib.contextmanager
    def visiting(self, segments):
        """Within it, the level after the one in use is built by a thread. segments: those of `open`, in the order of their use.

        An error of the thread is raised where the level is wanted. Leaving it, for whatever reason, ends the thread.
        """
        self._ahead = [each for each in segments if each is not None]
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)  # starts no thread before it has work
        try:
            yield
        finally:
            self._ahead = []
            with self._lock:
                self._drop([each for each, future in self._alive.items() if not future.done()])
            self._executor.shutdown(wait=True)

    def load(self, segment):
        """Have a segment in memory, and the building of the next one begun."""
        if segment is not None:
            self.loaded(segment)

    def loaded(self, segment):
        """What stands behind a stand-in; its caller must not keep it."""
        with self._lock:
            if segment is not self._current or segment not in self._alive:
                self._turn_to(segment)
            return self._alive[segment].result()

    def _turn_to(self, segment):
        following = self._after(segment)
        kept = (segment, self._current if following is None else following)
        self._drop([each for each in self._alive if each not in kept])
        if segment not in self._alive:
            self._build(segment)
        try:
            self._alive[segment].result()
        except BaseException:
            self._drop([segment])
            raise
        self._current = segment
        if self._is_threaded and following is not None and following not in self._alive:
            self._alive[following] = self._executor.submit(following.build)

    def _after(self, segment):
        """The segment that is expected after this one, or None."""
        if segment in self._ahead:
            del self._ahead[:self._ahead.index(segment) + 1]
        return next((each for each in self._ahead if each is not segment), None)

    def _build(self, segment):
        future = concurrent.futures.Future()
        future.set_result(segment.build())
        self._alive[segment] = future

    def _drop(self, segments):
        """Forget segments; one that the thread is just building is waited for, so that never a third is in memory."""
        for each in segments:
            future = self._alive.pop(each)
            if not future.cancel() and future.exception() is not None:
                LOG.debug("a level that was not used could not be built: %s", future.exception())


class OnDemand:
    """Stands in a level for its segment: `segment(images)` has it built first where it is not in memory."""

    def __init__(self, buffer, build):
        self._buffer, self.build = buffer, build

    def __call__(self, images):
        return self._buffer.loaded(self)(images)


LOADING = {"resident": lambda is_threaded: Resident(), "double_buffer": DoubleBuffer}
