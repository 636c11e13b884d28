"""Do runs that follow the advice of gradvitals end better?"""
