"""Packages of the wheel: lightseq, with data_gen/ and analysis/ inside it. pyproject.toml has everything else."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lightseq*"]), "lightseq.data_gen", "lightseq.analysis"],
    package_dir={"lightseq.data_gen": "data_gen", "lightseq.analysis": "analysis"},
)
