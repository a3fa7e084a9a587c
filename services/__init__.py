"""The processes of a SpecRoll run, and the command line that starts them."""

import os

# Before gRPC is imported anywhere. Its fork handlers start a thread in the child, whose descriptors are closed before
# exec: the thread then aborts the child, one in ten (grpc issue 43055). Our children exec; none uses what it inherits.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
