//! Processes: start, stop, takeover, and what a crash or a full disk leaves.

// Once:
mod backups;
mod doctor;
mod init;

// Once, slow:
mod core_dumps;
mod demo_nodes;
mod durability;

// On each driver:
mod process_lifecycle;
mod shutdown;

// On each driver, slow:
mod changes_in_use;
mod takeover;
mod takeover_state;
mod takeover_waiting;
