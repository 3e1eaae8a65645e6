"""The laws of the other rooms on real gloo ranks, and those that need real ranks."""
