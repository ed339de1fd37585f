"""Members that come and go. Nothing here imports torch.

limits          how long everyone waits
protocol        what members and the coordinator tell each other
member          what the coordinator knows of nodes
roster          decides who the members are (no sockets, no clock: easy to test)
coordinator     the server that runs a roster: `rumor coordinator`
offer           what the coordinator offers a node
link            a member's connection to the coordinator, in a thread
group           `rumor.elastic`, what users hand to the Averager
"""

from rumor.membership.group import ElasticGroup, elastic
from rumor.membership.offer import JobEndedError, RefusedError

__all__ = ["ElasticGroup", "JobEndedError", "RefusedError", "elastic"]
