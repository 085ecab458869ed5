"""Helpers for any package: text formatting, files, pickles, progress, masking of secrets, versions, processes."""
