//! A control plane in a temporary folder, for unit tests.

use std::ops::Deref;
use std::sync::Arc;

use gw_base::process::background::Background;
use gw_base::service::hostname::Region;
use gw_interface::config::Config;
use tempfile::TempDir;

use super::records::{account, service};
use super::{Actor, Control, NewAccount, NewService};
use crate::fuzz_support::NoWorkers;

/// A control plane without workers.
pub(super) struct TemporaryControl {
    control: Control,
    _background: Background,
    _folder: TempDir,
}

impl TemporaryControl {
    /// Starts it with the account `acme` and its service `api`, after `adjust` of its
    /// configuration.
    pub(super) fn start(adjust: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::new(Region::new("eu1", "example.com"), folder.path().to_owned());
        adjust(&mut config);
        let background = Background::start().unwrap();
        let control = Control::open(&config, Arc::new(NoWorkers), background.tasks()).unwrap();
        let account = NewAccount {
            id: "acme".to_owned(),
            capture_allowed: None,
            domains_max: None,
            managed_by: None,
        };
        account::create(&control, &Actor::Admin, &account).unwrap();
        let service = NewService {
            id: "api".to_owned(),
            ..NewService::default()
        };
        service::create(&control, &Actor::Admin, "acme", &service).unwrap();
        Self {
            control,
            _background: background,
            _folder: folder,
        }
    }
}

impl Deref for TemporaryControl {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}
