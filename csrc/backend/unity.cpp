// All of the backend in one translation unit: reading torch's headers is what takes the time.
#include "backend/gate.cpp"
#include "backend/manual_backend.cpp"
#include "backend/once_work.cpp"
#include "backend/throttled_backend.cpp"

#include "backend/bind.cpp"
