"""Hosts: the memory that a framework needs to run a plan. One folder per host."""
