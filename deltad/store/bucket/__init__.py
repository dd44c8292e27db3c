"""A run's twin in object storage: immutable objects by digest, and one pointer a run that is written last.

`port` is what is asked of a bucket, `obstore` the one module that imports the library of that name, `index` what a
run's pointer says, `twin` keeps a run in a bucket, and `sweep` removes what nobody needs there any more.
"""
