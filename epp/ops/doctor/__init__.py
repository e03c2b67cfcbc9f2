"""`kvpull doctor`: is this running fleet able to pull, and if not, what is wrong and how is it mended?

Gatherers ask (picker, engines, sidecars) and send probes of their own; checks look at what was gathered and
do no I/O, so each is testable without a fleet. Prompts, tokens, salts and keys are in no finding.
"""
