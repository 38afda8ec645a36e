//! Two endpoints with byte pipes in place of a connection. No I/O, no clock.

mod closing;
mod credit;
mod example;
mod memory;
mod model;
mod noise;
mod order;
mod requests;
mod shares;
mod util;
mod violations;
