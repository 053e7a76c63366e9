"""TENSILE (Zhang et al.): schedules of swaps and recomputations on a known time axis.

The paper schedules several jobs on one device; here there is one, as a plan is for one model. The paper's means for
several jobs (priorities, shifting one job's transfers around another's) and its updates of measured latencies (section
IV-E) are left out.
"""
