"""Where arrays lie: parameters, slots, and their parts on data shards."""
