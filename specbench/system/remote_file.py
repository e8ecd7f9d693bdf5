"""Read parts of a published file through HTTP ranges, as a file object."""

from __future__ import annotations

import http.client
import io
import time
import urllib.error

from specbench.errors import FAILURE, SpecbenchError
from specbench.system import downloads
from specbench.system.downloads import TRANSIENT, Progress, Remote, open_url, transient_reason

BLOCK_BYTES = 1 << 18
"""Bytes asked for at once, at least."""


class NoRanges(Exception):
    """The server does not send parts of this file, or has a file of another size."""


class RemoteFile(io.RawIOBase):
    """A published file of known size, read at the positions that are asked for.

    Raises:
        NoRanges: from a read, see there.
        SpecbenchError: not found, or unreachable after `downloads.ATTEMPTS` tries without a byte.
    """

    def __init__(self, remote: Remote, progress: Progress | None = None):
        if remote.size is None:
            raise NoRanges
        self._remote, self._size, self._progress = remote, remote.size, progress
        self._place = self._received = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer) -> int:
        stop = min(self._place + len(buffer), self._size)
        if stop <= self._place:
            return 0
        content = self._tried(self._place, stop)
        buffer[: len(content)] = content
        self._place += len(content)
        self._received += len(content)
        if self._progress:
            self._progress(self._received, None)
        return len(content)

    def _tried(self, start: int, stop: int) -> bytes:
        for attempt in range(1, downloads.DOWNLOAD_ATTEMPTS + 1):
            try:
                if content := self._range(start, stop):
                    return content
                reason = "cut off before a byte"
            except TRANSIENT as error:
                reason = transient_reason(self._remote.url, error)
            time.sleep(downloads.PAUSE_S * attempt)
        raise SpecbenchError(f"{self._remote.url}: {reason}", "run the same command again", FAILURE)

    def _range(self, start: int, stop: int) -> bytes:
        """The bytes of one request, of which there may be fewer than wanted."""
        try:
            opened = open_url(self._remote.url, {"Range": f"bytes={start}-{stop - 1}"})
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the file ends before
                raise NoRanges from None
            raise
        with opened as response:
            sent = response.headers.get("Content-Range")
            if response.status != 206 or sent != f"bytes {start}-{stop - 1}/{self._size}":
                raise NoRanges
            try:
                return response.read(stop - start)
            except http.client.IncompleteRead as error:
                return error.partial
