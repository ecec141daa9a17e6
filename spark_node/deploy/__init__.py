"""Peers on several hosts: what runs where, and the containers that run it."""
