//! Records that `gw-gateway init` makes without a running gateway.

use gw_base::process::background::Background;
use gw_control_plane::control::records::account;
use gw_control_plane::control::{Actor, Control, ControlError, NewAccount};
use gw_data_plane::worker::WorkerHandles;
use gw_interface::config::Config;
use gw_shared::id::AccountId;

/// Creates an account in the records of a gateway that does not run, with the data folder if that
/// is missing. Returns whether the account did not exist.
pub fn create_account(config: &Config, account: &AccountId) -> Result<bool, ControlError> {
    let background = Background::start()?;
    let control = Control::open(config, WorkerHandles::new(Vec::new()), background.tasks())?;
    let (_, created) = account::create(
        &control,
        &Actor::Admin,
        &NewAccount {
            id: account.to_string(),
            capture_allowed: None,
            domains_max: None,
            managed_by: None,
        },
    )?;
    Ok(created)
}
