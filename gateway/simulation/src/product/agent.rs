//! The state folder and the configuration of an agent.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use gw_agent::Config;
use gw_agent::SLOTS_VARIABLE;
use gw_agent::identity::state::{Enrollment, StateDir};
use gw_agent::support::simulation::enrolled;
use gw_shared::id::{AccountId, AgentId, ServiceId};
use gw_store::ServicePath;

use super::{Region, SetupError};

/// An agent to enroll.
#[derive(Debug, Clone)]
pub struct AgentPlan {
    /// Number of the agent, from which its id is made. Two agents with one number are copies of one
    /// state folder.
    pub number: u32,
    /// Services that the agent may serve, all of one account, each with the URLs of its backends.
    pub services: Vec<(ServicePath, Vec<String>)>,
    /// Requests at once on each tunnel.
    pub slots: u32,
    /// The agent says that it gets requests only while no other agent can take them.
    pub standby: bool,
}

impl AgentPlan {
    /// Id of the agent.
    pub fn id(&self) -> Result<AgentId, SetupError> {
        Ok(AgentId::new(&format!("ag_{:020}", self.number))?)
    }

    /// The account of the agent, and the services that it may serve.
    pub(super) fn services_of_account(
        &self,
    ) -> Result<(AccountId, BTreeSet<ServiceId>), SetupError> {
        let mut paths = self.services.iter().map(|(path, _)| path);
        let none = || SetupError::Plan(format!("agent {} has no service", self.number));
        let ServicePath(account, _) = self
            .services
            .first()
            .map(|(path, _)| path)
            .ok_or_else(none)?;
        if paths.any(|ServicePath(other, _)| other != account) {
            let message = format!("agent {} has services of two accounts", self.number);
            return Err(SetupError::Plan(message));
        }
        let services = self
            .services
            .iter()
            .map(|(ServicePath(_, id), _)| id.clone());
        Ok((account.clone(), services.collect()))
    }

    /// Enrolls the agent: adds its record to the region, and writes its files as [`Self::store`]
    /// does.
    pub fn enroll(
        &self,
        region: &mut Region,
        gateway: SocketAddr,
        folder: &Path,
    ) -> Result<Config, SetupError> {
        region.add_agent(self)?;
        self.store(region, gateway, folder)
    }

    /// Writes the state folder and the configuration file of the agent below `folder`, which has to
    /// exist, for a gateway that listens on `gateway`. Further calls, with other folders, make
    /// copies.
    pub fn store(
        &self,
        region: &Region,
        gateway: SocketAddr,
        folder: &Path,
    ) -> Result<Config, SetupError> {
        let (account, services) = self.services_of_account()?;
        let hostnames = services
            .iter()
            .filter_map(|service| region.name().tenant_hostname(&account, service));
        let enrollment = Enrollment {
            agent_id: self.id()?,
            gateway_name: region.name().apex().to_owned(),
            gateway_host: gateway.ip().to_string(),
            gateway_port: gateway.port(),
            services: hostnames.collect(),
            later: Default::default(),
        };
        let certificates = region.certificates();
        let identity = certificates.identity(&account, &enrollment.agent_id)?;
        let authority = certificates.public_authority();
        let state = StateDir::new(folder.join("state"));
        fs::create_dir_all(state.path())?;
        enrolled(&state, &enrollment, &identity.pem, authority)?;
        fs::write(folder.join(CONFIGURATION), self.configuration(region)?)?;
        self.load(folder)
    }

    /// The configuration of an agent that has enrolled, as at every start of its program. The
    /// gateway may have changed its services.
    pub fn load(&self, folder: &Path) -> Result<Config, SetupError> {
        let slots = self.slots.to_string();
        let environment = |name: &str| (name == SLOTS_VARIABLE).then(|| slots.clone());
        Ok(Config::load(
            Some(&folder.join(CONFIGURATION)),
            Some(folder.join("state")),
            &[],
            environment,
        )?)
    }

    fn configuration(&self, region: &Region) -> Result<String, SetupError> {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(text, "standby = {}\n[backends]", self.standby);
        for (ServicePath(account, service), urls) in &self.services {
            let hostname = region.name().tenant_hostname(account, service);
            let hostname = hostname.ok_or_else(|| {
                SetupError::Plan(format!(
                    "{account}--{service} is too long for a label of DNS"
                ))
            })?;
            let _ = writeln!(text, "{hostname:?} = {urls:?}");
        }
        Ok(text)
    }
}

/// Name of the configuration file.
const CONFIGURATION: &str = "agent.toml";
