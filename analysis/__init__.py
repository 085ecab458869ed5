"""Reads what runs wrote and draws it; needs neither torch nor the runs' machines."""
