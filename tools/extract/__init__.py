"""From records of runs to Definitions: which the recorded calls have, and which they lack."""
