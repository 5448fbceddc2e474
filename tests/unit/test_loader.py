from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from qflux.data import reader
from qflux.data.reader import read_ahead
from qflux.errors import CacheError
from worlds import HANG


@pytest.mark.parametrize("workers", [0, 1, 3, 8])
def test_results_come_in_order_whatever_the_number_of_workers(workers):
    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    assert list(read_ahead(work, range(40), workers)) == [i * i for i in range(40)]


def test_reading_stays_a_little_ahead_and_no_further():
    started = []
    ahead = read_ahead(lambda item: started.append(item) or item, range(100), workers=2)
    assert next(ahead) == 0
    time.sleep(0.1)
    assert 1 < len(started) <= 4
    ahead.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_when_its_item_is_due_and_ends_the_rest(workers):
    def work(item: int) -> int:
        if item == 3:
            raise CacheError("item 3 is broken")
        return item

    ahead = read_ahead(work, range(10), workers)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(CacheError, match="item 3"):
        next(ahead)
    assert list(ahead) == []


def test_closing_early_leaves_no_thread_at_work():
    ahead = read_ahead(lambda item: time.sleep(0.05), range(1000), workers=4)
    next(ahead)
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("qflux-reader")]


def test_a_read_that_never_returns_does_not_keep_the_process_alive():
    program = (
        "import time\nfrom qflux.data import reader\nreader.FAREWELL = 0.2\n"
        "ahead = reader.read_ahead(lambda seconds: time.sleep(seconds), [0, 1000, 1000], 2)\n"
        "next(ahead)\nahead.close()"
    )
    subprocess.run([sys.executable, "-c", program], timeout=HANG, check=True)


def test_a_stuck_read_is_named_while_it_lasts(monkeypatch, caplog):
    monkeypatch.setattr(reader, "PATIENCE", 0.05)
    assert list(read_ahead(lambda item: time.sleep(0.2) or item, ["slow.png"], 1, str)) == ["slow.png"]
    assert "reading slow.png has taken" in caplog.text


def test_a_work_that_times_out_is_an_error_not_a_wait(monkeypatch):
    monkeypatch.setattr(reader, "PATIENCE", 0.05)

    def work(item: int) -> int:
        raise TimeoutError("the file server")

    with pytest.raises(TimeoutError, match="the file server"):
        list(read_ahead(work, [1], 1))
