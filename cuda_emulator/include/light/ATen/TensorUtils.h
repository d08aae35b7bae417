// The headers of PyTorch's operators include this one, and use nothing of it.
#pragma once
