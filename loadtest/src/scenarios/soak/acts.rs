//! What faults consist of.

use std::time::Duration;

use rustix::process::Signal;

use super::engine::Engine;
use super::site::Site;
use super::world::Machine;
use crate::failure::Failure;

/// A part of the region that runs as processes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    Node(usize),
    Agent(usize),
    /// The server of PostgreSQL that takes changes.
    Engine,
}

/// One step of a fault, or of its end.
#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    /// Packets from one machine to another are lost.
    Cut(Machine, Machine),
    Heal(Machine, Machine),
    /// No packet reaches the machine or leaves it.
    Unplug(Machine),
    PlugIn(Machine),
    /// The processes of the part do not run, and do not end.
    Freeze(Part),
    Continue(Part),
    Kill(Part),
    Start(Part),
    /// The part ends in order: a node leaves the region, an agent waits for its next process.
    Stop(Part),
    /// Another process takes the place of that of a node.
    Replace(usize),
    /// The primary is killed, and the standby takes changes.
    FailOver,
    /// The earlier primary becomes the standby.
    Follow,
    /// Nodes go to the next release, and agents follow.
    Upgrade,
    /// The fault lasts for a while before its next step.
    Wait(Duration),
}

impl Site {
    pub(super) fn perform(&mut self, act: Act) -> Result<(), Failure> {
        match act {
            Act::Cut(from, to) => self.world.cut(from, to),
            Act::Heal(from, to) => self.world.heal(from, to),
            Act::Unplug(machine) => self.world.unplug(machine),
            Act::PlugIn(machine) => self.world.plug_in(machine),
            Act::Freeze(part) => self.signal(part, Signal::STOP),
            Act::Continue(part) => self.signal(part, Signal::CONT),
            Act::Kill(Part::Node(node)) => self.nodes[node].kill(),
            Act::Kill(Part::Agent(agent)) => self.agents[agent].kill(),
            Act::Kill(Part::Engine) => self.engines[self.primary].kill(),
            Act::Start(Part::Node(node)) => self.start_node(node),
            Act::Start(Part::Agent(agent)) => {
                let agent = &mut self.agents[agent];
                self.world.on(Machine::Agents, || agent.run())
            }
            Act::Start(Part::Engine) => self.engines[self.primary].run(&self.world),
            Act::Stop(Part::Node(node)) => self.nodes[node].stop(),
            Act::Stop(Part::Agent(agent)) => self.agents[agent].stop(),
            Act::Stop(Part::Engine) => self.engines[self.primary].stop(),
            Act::Replace(node) => self.nodes[node].replace(),
            Act::FailOver => self.fail_over(),
            Act::Follow => self.follow(),
            Act::Upgrade => self.upgrade(),
            Act::Wait(_) => Ok(()),
        }
    }

    fn signal(&self, part: Part, signal: Signal) -> Result<(), Failure> {
        match part {
            Part::Node(node) => self.nodes[node].signal(signal),
            Part::Agent(agent) => self.agents[agent].signal(signal),
            Part::Engine => self.engines[self.primary].signal(signal),
        }
        Ok(())
    }

    fn fail_over(&mut self) -> Result<(), Failure> {
        let standby = 1 - self.primary;
        self.engines[standby].wait_for(&self.engines[self.primary], &self.world)?;
        self.engines[self.primary].kill()?;
        self.primary = standby;
        self.engines[standby].promote(&self.world)
    }

    fn follow(&mut self) -> Result<(), Failure> {
        let other = 1 - self.primary;
        let machine = Machine::Engine(other);
        // A folder that no engine has used.
        let mut folder = self.folder.path().join(format!("engine-{other}"));
        while folder.exists() {
            folder.set_extension(format!(
                "{}x",
                folder.extension().unwrap_or_default().display()
            ));
        }
        self.engines[other] = Engine::standby(
            &self.world,
            machine,
            &folder,
            &self.gateway,
            &self.engines[self.primary],
        )?;
        Ok(())
    }
}
