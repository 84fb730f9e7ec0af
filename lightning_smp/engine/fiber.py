"""Forwards that stop in the middle: functions in pooled threads, exactly one running at a time."""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

__all__ = ["Cancelled", "Fiber", "FiberPool", "ThreadModes"]


class Cancelled(BaseException):
    """Raised inside a suspended fiber that will not be resumed, so that its cleanup runs."""


class Fiber:
    """A call that can suspend itself; `resume` gives it control until it suspends or ends.

    Raw locks pass control in about 7 microseconds.

    Args:
        pool: gives the thread.
        function: the call.
        modes: what the call starts with. A fiber is also made inside of the user's ``with`` blocks,
            which are not meant for it, so that it cannot take them from where it is made.
    """

    def __init__(
        self, pool: FiberPool, function: Callable[[], Any], modes: ThreadModes
    ) -> None:  # fmt: skip
        self._pool = pool
        self._function = function
        self._mine = _thread.allocate_lock()
        self._theirs = _thread.allocate_lock()
        self._mine.acquire()
        self._theirs.acquire()
        self._modes = modes
        self._cancelled = False
        self._started = False
        self.done = False
        self.result: Any = None
        self._error: BaseException | None = None

    def resume(self) -> None:
        """Runs the fiber until it suspends or ends; raises what it raised."""
        dtype = torch.get_default_dtype()  # of the process, and a block in the fiber may change it
        if self._started:
            self._mine.release()
        else:
            self._started = True
            self._pool.start(self)
        self._theirs.acquire()
        _set_default_dtype(dtype)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def suspend(self) -> None:
        """Called inside the fiber: gives control back to who resumed it."""
        dtype = torch.get_default_dtype()
        self._theirs.release()
        self._mine.acquire()
        _set_default_dtype(dtype)
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Ends a suspended fiber; its ``finally`` blocks run."""
        if not self._started:
            self._started = self.done = True
        elif not self.done:
            self._cancelled = True
            with contextlib.suppress(Cancelled):
                self.resume()

    def run(self) -> None:
        """Called by the pool's thread."""
        try:
            with self._modes.applied():
                self.result = self._modes.context.copy().run(self._function)
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            self._theirs.release()


class FiberPool:
    """Daemon threads that are reused, since making one costs up to 0.8 ms.

    They end with the pool, whose engine is one of many in a process that trains again and again.
    """

    def __init__(self) -> None:
        self._idle = _Idle()
        weakref.finalize(self, self._idle.close).atexit = False

    def start(self, fiber: Fiber) -> None:
        """Runs the fiber in a thread."""
        worker = self._idle.pop() or _Worker(self._idle)
        worker.give(fiber)

    def close(self) -> None:
        """Lets the idle threads end, and the others once they are idle."""
        self._idle.close()


class _Idle:
    """The workers that have nothing to do."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._is_closed = False

    def pop(self) -> _Worker | None:
        return self._workers.pop() if self._workers else None

    def put(self, worker: _Worker) -> bool:
        """Called by the worker itself; returns whether it will be given something, or None."""
        self._workers.append(worker)
        if self._is_closed:
            with contextlib.suppress(ValueError):  # `close` has it already
                self._workers.remove(worker)
                return False
        return True

    def close(self) -> None:
        self._is_closed = True
        while self._workers:
            self._workers.pop().give(None)


class _Worker:
    def __init__(self, idle: _Idle) -> None:
        self._idle = idle
        self._fiber: Fiber | None = None
        self._wake = _thread.allocate_lock()
        self._wake.acquire()
        threading.Thread(target=self._serve, name="smp-forward", daemon=True).start()

    def give(self, fiber: Fiber | None) -> None:
        self._fiber = fiber
        self._wake.release()

    def _serve(self) -> None:
        is_needed = True
        while is_needed:
            self._wake.acquire()
            fiber, self._fiber = self._fiber, None
            if fiber is None:
                return
            fiber.run()
            del fiber
            is_needed = self._idle.put(self)


class ThreadModes:
    """What a call has of its own: grad mode, inference mode, autocast, the device, the context.

    So is torch's default dtype, though the process has only one, which `Fiber` exchanges. They are
    taken from the thread that makes this object.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        ]  # fmt: skip

    def applied(self) -> AbstractContextManager[Any]:
        """Gives this thread all but the context, until the end of the block."""
        _set_default_dtype(self._dtype)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
        if self._grad and not self._inference and not self._autocast:
            return nullcontext()  # as in every thread
        stack = ExitStack()
        if self._inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for device, dtype in self._autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        return stack


def _set_default_dtype(dtype: torch.dtype) -> None:
    if torch.get_default_dtype() is not dtype:
        torch.set_default_dtype(dtype)
