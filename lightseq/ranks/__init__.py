"""The processes of a run: who they are, whether they are all there, and that none waits for ever."""
