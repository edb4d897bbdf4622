"""Pictures of what a schedule did: graphs before and after, memory, stages and shares, on one page of HTML."""
