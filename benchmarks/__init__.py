"""Read records, make canaries, and build the labs: everything that an audit attacks."""
