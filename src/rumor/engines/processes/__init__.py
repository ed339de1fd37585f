"""The engine of real processes. Only transport.py imports torch.distributed; gloo_group.py its C++ classes.

transport       one torch.distributed group: sends, receives, waits, and errors that say who is lost
gloo_group      the group of members that come and go
liveness        finds out which peer is lost
handshake       all ranks compare their set-up before the first step
message         a bucket with a head in front
alarm           keeps a model that is not finite from spreading
channel         the memory of one bucket (gpu_staging: of one on a GPU whose messages travel from host memory)
pending         messages in flight: gossip and sums
process_group   the engine
local_group     a node of several ranks (local_shard: the part of the model that one of them exchanges)
join            a vote whether every node has another batch
"""
