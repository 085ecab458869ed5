"""The processes of a run: ranks, meshes, rendezvous, the watchdog and shutdown."""
