"""What looks after a run: clock, health, audits, preemption, programs, progress, and what is written of it."""
