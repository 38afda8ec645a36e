//! The membership of a gateway in a region of several nodes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gw_control_plane::control::ControlError;
use gw_control_plane::members::{Members, MembersSetup};
use gw_interface::config::Config;
use gw_region::{CarriedMembership, Isolation, NodeConfig, NodeSlot, RegionKeys};
use gw_store::PostgresStore;
use gw_telemetry::request_log::archive::ArchiveSettings;

use super::control_plane::archive_audit_heads;
use super::gateway::{Gateway, StartError};

/// Longest wait until the services of this node have moved to other nodes.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// What the membership needs of the configuration.
pub(super) struct MemberSettings {
    peer_address: SocketAddr,
    isolation: Isolation,
    data_dir: PathBuf,
    archive: Option<ArchiveSettings>,
}

impl MemberSettings {
    /// `None` without a listener for other nodes, whose address is `listener`.
    pub(super) fn of(config: &Config, listener: Option<SocketAddr>) -> Option<Self> {
        Some(Self {
            peer_address: config.peer_address.or(listener)?,
            isolation: config.isolation,
            data_dir: config.data_dir.clone(),
            archive: config.archive.clone(),
        })
    }
}

impl Gateway {
    /// Joins the region, or continues the membership of an earlier process.
    pub(super) fn start_members(
        &mut self,
        carried: Option<CarriedMembership>,
    ) -> Result<(), StartError> {
        let Some(settings) = &self.node.settings else {
            return Ok(());
        };
        let MemberSettings {
            peer_address,
            isolation,
            data_dir,
            archive,
        } = settings;
        let Some(source) = self.control.postgres_source() else {
            return Ok(());
        };
        let node = NodeConfig {
            slot: None,
            session: random_session()?,
            peer_address: *peer_address,
            version: env!("CARGO_PKG_VERSION").into(),
            isolation: *isolation,
        };
        let setup = MembersSetup {
            tasks: self.background.tasks(),
            control: Arc::clone(&self.control),
            store: PostgresStore::new(source).map_err(ControlError::from)?,
            node,
            carried,
            signals: Arc::clone(&self.node.signals),
            data_dir: data_dir.clone(),
            on_slot: self.archive_at_slot(
                archive
                    .clone()
                    .map(|archive| (archive, source.keys.clone())),
            ),
        };
        self.node.members = Some(Members::start(setup).map_err(StartError::Membership)?);
        Ok(())
    }

    /// Starts the archive of the request log once this node has its slot.
    fn archive_at_slot(
        &self,
        archive: Option<(ArchiveSettings, RegionKeys)>,
    ) -> Box<dyn Fn(NodeSlot) + Send> {
        let log = Arc::clone(&self.request_log);
        let control = Arc::clone(&self.control);
        let apex = self.control.region().apex().to_owned();
        Box::new(move |slot| {
            let Some((settings, keys)) = &archive else {
                return;
            };
            match log.archive_to(settings, keys, &apex, slot) {
                Ok(()) => archive_audit_heads(&control, &log),
                Err(error) => tracing::error!(%error, "the request log is not archived"),
            }
        })
    }

    /// Moves the services of this node to other nodes.
    pub(super) fn leave_region(&self) {
        if let Some(members) = &self.node.members {
            members.leave(LEAVE_WITHIN);
        }
    }
}

/// Sessions after it, which this process uses if it has to join again, are numbers, too.
fn random_session() -> Result<u128, ControlError> {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes)?;
    Ok(u128::from_be_bytes(bytes) >> 1)
}
