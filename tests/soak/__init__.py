"""Three regions, two runs, and random faults for as long as is asked for; checked by what happened."""
