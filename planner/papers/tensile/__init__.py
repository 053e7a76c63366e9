"""TENSILE (Zhang et al.): schedules of swaps and recomputations on a time axis that is known beforehand.

The paper schedules several jobs on one device; here there is one, as a plan is for one model. What the paper does for
several (priorities, shifting one job's transfers around another's) and its updates of measured latencies (section IV-E)
are left out.
"""
