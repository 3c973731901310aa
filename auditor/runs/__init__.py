"""Run one audit: choose text forms, build targets, query and measure cells; also train and
mitigate."""
