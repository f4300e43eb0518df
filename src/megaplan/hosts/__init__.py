"""Hosts: what a framework keeps in memory when it runs a plan. One folder a host."""
