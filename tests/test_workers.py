"""Processes that do jobs: who does them, what they say, mistakes, death, and hanging up."""

import os
import signal
import threading
from pathlib import Path

import pytest
from tqdm.auto import tqdm

from trl_explore.errors import UsageError
from trl_explore.runs.workers import AT_WORK, DONE, Job, WorkerFailed, Workers, death


def square(connection, number):
    connection.send((AT_WORK, os.getpid()))
    return number * number


def lock_of_bars(connection, number):
    return type(tqdm.get_lock())


def wrong(connection, number):
    raise ValueError(f"{number} is wrong")


def refuse(connection, number):
    raise UsageError(f"number={number}: give another one")


def end_by_signal(connection, number):
    os.kill(os.getpid(), number)


def until_hung_up(connection, file):
    connection.poll(None)  # the parent says nothing more: this is its end
    Path(file).write_text("saved")
    raise KeyboardInterrupt


def stubborn(connection, number):
    connection.send((AT_WORK, number))
    connection.poll(None)
    os.kill(os.getppid(), signal.SIGINT)  # the second time that Ctrl-C is pressed
    while True:
        signal.pause()


def jobs(function, *arguments):
    return [Job(f"job {argument}", function, (argument,)) for argument in arguments]


def processes_of(workers):
    return list(workers.processes.values())


def test_processes_take_one_job_after_the_other_and_leave_ctrl_c_to_their_parent():
    with Workers(2) as workers:
        heard = list(workers.do(jobs(square, 1, 2, 3)))
        for process in processes_of(workers):
            os.kill(process.pid, signal.SIGINT)
        heard += workers.do([*jobs(square, 4), *jobs(lock_of_bars, "lock")])
        assert {value for _, kind, value in heard if kind == AT_WORK} <= {p.pid for p in processes_of(workers)}
    results = {job.name: value for job, kind, value in heard if kind == DONE}
    assert results.pop("job lock") is type(threading.RLock())  # no semaphore that could be left behind
    assert results == {"job 1": 1, "job 2": 4, "job 3": 9, "job 4": 16}
    assert len(heard) == 9
    assert [process.exitcode for process in processes_of(workers)] == [0, 0]


def test_a_job_that_raises_ends_in_a_sentence_and_the_others_save_what_they_have(tmp_path):
    file = tmp_path / "file"
    with pytest.raises(WorkerFailed, match=r"^job 7 ended in ValueError: 7 is wrong$") as caught:
        with Workers(2) as workers:
            list(workers.do([*jobs(until_hung_up, str(file)), *jobs(wrong, 7)]))
    assert caught.value.details.startswith("Traceback") and "in wrong" in caught.value.details
    assert file.read_text() == "saved"


def test_a_usage_error_of_a_job_reaches_the_parent():
    with pytest.raises(UsageError, match=r"^number=7: give another one$"), Workers(1) as workers:
        list(workers.do(jobs(refuse, 7)))


def test_a_process_that_is_killed_ends_in_a_sentence_and_the_others_save_what_they_have(tmp_path):
    file = tmp_path / "file"
    sentence = "^the process of job 9 was killed, probably because the machine ran out of memory$"
    with pytest.raises(WorkerFailed, match=sentence):
        with Workers(2) as workers:
            list(workers.do([*jobs(until_hung_up, str(file)), *jobs(end_by_signal, signal.SIGKILL.value)]))
    assert file.read_text() == "saved"
    assert death(-15) == "was ended by signal 15" and death(3) == "ended with exit code 3"


def test_no_notice_of_saved_runs_after_the_jobs_were_killed(capsys):
    with pytest.raises(KeyboardInterrupt):
        with Workers(1), Workers(1) as workers:
            for _ in workers.do(jobs(stubborn, 1)):
                workers.kill()
                raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_a_second_ctrl_c_waits_for_nothing(capsys):
    with pytest.raises(KeyboardInterrupt):
        with Workers(1) as workers:
            for _ in workers.do(jobs(stubborn, 1)):
                raise KeyboardInterrupt
    assert [process.exitcode for process in processes_of(workers)] == [-signal.SIGKILL]
    assert "Ctrl-C again aborts now" in capsys.readouterr().err
