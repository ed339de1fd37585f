"""How long members and the coordinator wait, in seconds. Nobody should have to tune these: those that must follow the step time do.

With steps of 10 ms, a member counts as silent after 5 s, and as hung after 60 s. With steps of 30 s, after 30 s and 300 s. A process that
ends is missed at once in any case, because its connection closes.
"""

from __future__ import annotations

# signs of life
BEAT = 0.5  # between two of them
SILENCE = 5.0  # without one, after which a member counts as lost; a long call may keep Python's threads from running, so
SILENCE_STEPS, SILENCE_MOST = 2.0, 30.0  # it is so many of its slowest steps if that is longer, but no more than this
STUCK = 5.0  # for a member to notice that its epoch is broken, or as long as it may be silent

# a member that is alive and keeps others waiting
HUNG_LEAST, HUNG_STEPS = 60.0, 10.0  # it hangs after this, or so many of the slowest steps if that is longer,
HUNG_MOST = 1800.0  # but after no more than this: a pause between steps, such as an evaluation, counts as a slow step
FIRST_STEP = 300.0  # it may take for its first step in any case: compilers and GPUs warm up
SLOW_LEAST = 1.0  # it may take for a step in any case, with drop_slow
DROPPED_FIRST, DROPPED_MOST = 10.0, 600.0  # until one that is dropped for the second time is let in again; twice as long each time
FORGIVEN_AFTER = 600.0  # without being dropped, after which the next time counts as the first

# connections
CONNECT_WITHIN = 60.0  # the first connection to a coordinator that may start later than its members
SAY_NO_COORDINATOR_AFTER = 3.0  # of these
RETRY = 0.3  # between two attempts to reach the coordinator
HELLO_WITHIN = 10.0  # for a connection to introduce itself
MEET_WITHIN = 30.0  # for all members of an epoch to connect to each other
FAILURES, RETRY_AFTER = 3, 10.0  # how often a newcomer may fail to do so, and how long it waits after the second time

# beginnings and ends
JOIN_WINDOW = 1.0  # without a further newcomer before a new job begins
START_GRACE = 2.0  # for the members of a job to come back to a coordinator that was started again, before a new job may begin
# without a coordinator after a loss, a member does without the average after this, or after the silence that it is allowed if its steps
# are long. By then, a coordinator that lives, but can't be reached, has dropped it.
ALONE_AFTER = 5.0
END_WITHOUT = 30.0  # without a coordinator, before a node ends without it
SAY_SO_AFTER = 10.0  # of waiting
