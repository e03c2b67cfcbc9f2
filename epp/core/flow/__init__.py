"""Requests that wait for room: priority bands, fairness between flows, order inside one. Pure.

bands       settings: who may wait, and how much of it
ordering    which request of a flow is next
fairness    which flow of a band is next
queue       all of it together: offer, take, expire, cancel
"""
